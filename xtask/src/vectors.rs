//! The test vectors of the shared mathematics, written by a program of the daemon's crate.

use std::path::{Path, absolute};

use anyhow::{Context as _, bail};

use crate::context::Context;
use crate::shell::{read, run};

const PROGRAM: &str = "heapbpf-vectors";

/// Runs the program that writes the vectors.
pub fn write(context: &Context, directory: &Path) -> anyhow::Result<()> {
    // The program runs in the workspace's root, the user may be elsewhere.
    let directory = absolute(directory).with_context(|| format!("cannot resolve {}", directory.display()))?;
    let mut command = context.cargo("run");
    command.args(["--quiet", "--package", "sampler-user", "--bin", PROGRAM, "--"]).arg(&directory);
    let programs = read(context.cargo("metadata").args(["--no-deps", "--format-version", "1"]))?;
    if !programs.contains(&format!("\"name\":\"{PROGRAM}\"")) {
        bail!("the crate sampler-user has no program {PROGRAM} in this version");
    }
    run(&mut command, context.options.verbose)
}
