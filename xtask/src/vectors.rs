//! Checking the mathematics against files of known answers, by a program of the daemon's crate.

use std::path::{Path, absolute};
use std::process::ExitCode;

use anyhow::Context as _;

use crate::context::Context;
use crate::shell::succeeds;

/// Checks every file in the folder; a failure if an answer is off.
pub fn check(context: &Context, directory: &Path) -> anyhow::Result<ExitCode> {
    // The program runs in the workspace's root, the user may be elsewhere.
    let directory = absolute(directory).with_context(|| format!("cannot resolve {}", directory.display()))?;
    let mut command = context.cargo("run");
    command.args(["--quiet", "--package", "sampler-user", "--bin", "heapbpf-vectors", "--"]).arg(&directory);
    // It has said itself what is wrong.
    Ok(if succeeds(&mut command, context.options.verbose)? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
