//! Checks of a release: that everybody who builds it gets the same bytes, and that it works elsewhere.

mod again;
mod root;
mod roots;

use std::path::Path;
use std::process::{Command, ExitCode};

use clap::ValueEnum;

use super::{Made, Release};
use crate::context::Context;
use crate::packages::{self, Package};
use crate::shell::{run, say};

/// Which checks to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// All of them
    All,
    /// A second build in another directory, byte by byte
    Again,
    /// Debian's checker of packages
    Lintian,
    /// Installed, run and removed in roots of Debian 11, 12 and 13, and run in one with musl
    Roots,
}

/// Checks a release that was just made. The exit code is a failure if one of the checks failed.
pub fn check(
    context: &Context,
    release: &Release,
    made: &Made,
    part: Part,
    alpine: Option<&Path>,
) -> anyhow::Result<ExitCode> {
    let is_wanted = |this: Part| part == Part::All || part == this;
    let mut failed = Vec::new();
    let mut note = |what: &str, result: anyhow::Result<()>| match result {
        Ok(()) => say!("passed: {what}"),
        Err(error) => failed.push(format!("{what}: {error:#}")),
    };
    if is_wanted(Part::Lintian) {
        note("lintian finds nothing in the package", lintian(context, release));
    }
    if is_wanted(Part::Roots) {
        for suite in &roots::SUITES {
            note(&format!("Debian {}", suite.name), roots::debian(context, release, suite));
        }
        let with =
            if alpine.is_some() { "the given root with musl" } else { "musl and busybox (a stand-in for Alpine)" };
        note(with, roots::musl(context, release, alpine));
    }
    if is_wanted(Part::Again) {
        note("a second build in another directory gives the same bytes", again::compare(context, release, made));
    }
    for line in &failed {
        say!("failed: {line}");
    }
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn lintian(context: &Context, release: &Release) -> anyhow::Result<()> {
    packages::install(context, &[Package::new("lintian", "checks the package")])?;
    let mut command = Command::new("lintian");
    command.args(["--allow-root", "--fail-on", "error,warning", "--tag-display-limit", "0"]).arg(release.package());
    run(&mut command, context.options.verbose)
}
