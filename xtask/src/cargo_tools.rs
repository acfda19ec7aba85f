//! What cargo knows of the workspace, and the cargo subcommands that xtask uses, built once into the cache. One of them
//! is `cargo xtask deny`, which checks the licences and sources of all dependencies against deny.toml.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;
use serde_json::Value;

use crate::context::Context;
use crate::shell::{host_cargo, is_executable, read, run, run_quietly, say};

/// Returns the output of a `cargo metadata` call.
pub fn metadata(command: &mut Command) -> anyhow::Result<Value> {
    serde_json::from_str(&read(command.arg("--format-version=1"))?).context("cargo metadata wrote no JSON")
}

/// Returns the program of the package of the same name. Builds it if it is not in the cache, without optimisation,
/// because it does little work itself.
pub fn installed(context: &Context, package: &str, version: &str) -> anyhow::Result<PathBuf> {
    let dir = context.cache()?.join(format!("{package}-{version}"));
    let program = dir.join("bin").join(package);
    if !is_executable(&program) {
        say!("installing {package} {version}, which takes a minute or two");
        let mut install = Command::new(host_cargo());
        install.args(["install", "--locked", "--debug", package, "--version", version, "--root"]).arg(&dir);
        // Outside the workspace's target directory, and without debug information.
        install.env("CARGO_TARGET_DIR", dir.join("build")).env("CARGO_PROFILE_DEV_DEBUG", "0");
        run_quietly(&mut install, context.options.verbose)?;
        std::fs::remove_dir_all(dir.join("build"))?;
    }
    Ok(program)
}

/// The version of cargo-deny that is installed.
const DENY_VERSION: &str = "0.20.2";

/// Always checked. Advisories need a database, which is a git repository.
const ALWAYS: &[&str] = &["licenses", "bans", "sources"];

/// Checks licences, banned crates and sources. With `advisories`, fetches the database of known vulnerabilities and
/// checks these as well.
///
/// # Errors
/// A dependency is not allowed, or cargo-deny cannot be installed.
pub fn deny(context: &Context, advisories: bool) -> anyhow::Result<()> {
    let program = installed(context, "cargo-deny", DENY_VERSION)?;
    run(&mut check(&program, &context.root, advisories), context.options.verbose)
}

fn check(program: &Path, root: &Path, advisories: bool) -> Command {
    let mut command = Command::new(program);
    // Several versions of a crate cause only warnings, and there are many of these.
    command.current_dir(root).args(["--log-level", "error", "--locked"]);
    command.arg("check").args(ALWAYS).args(if advisories { ["advisories"].as_slice() } else { &[] });
    command
}
