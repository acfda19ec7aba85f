//! Checks the mathematics against files of known answers, with a program of the crate `heapbpf-bench`.

use std::path::{Path, absolute};
use std::process::ExitCode;

use anyhow::Context as _;

use crate::context::Context;
use crate::shell::succeeds;

/// Checks every file in the directory. Fails if an answer is wrong.
pub fn check(context: &Context, directory: &Path) -> anyhow::Result<ExitCode> {
    // The program runs in the workspace's root, but the user may be in another directory.
    let directory = absolute(directory).with_context(|| format!("cannot resolve {}", directory.display()))?;
    let mut command = context.cargo_for_tests("run");
    command.args(["--quiet", "--package", "heapbpf-bench", "--bin", "heapbpf-vectors", "--"]).arg(&directory);
    // The program has already printed what is wrong.
    Ok(if succeeds(&mut command, context.options.verbose)? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
