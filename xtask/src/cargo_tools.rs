//! What cargo knows of the workspace, and the cargo subcommands that xtask uses, built once into the cache.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use serde_json::Value;

use crate::context::Context;
use crate::programs::{host_cargo, is_executable};
use crate::shell::{read, run_quietly, say};

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
