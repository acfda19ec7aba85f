//! Installs the tools for building for another machine.

use std::path::Path;
use std::process::Command;

use anyhow::Context as _;

use crate::context::Context;
use crate::cross::Machine;
use crate::packages::{self, Package};
use crate::programs::on_path;
use crate::shell::{read, run_quietly, say};

/// Installs the standard library, which is all that checking needs.
///
/// # Errors
/// If it cannot be installed.
pub fn set_up_library(context: &Context, machine: &Machine) -> anyhow::Result<()> {
    if has_standard_library(machine) {
        return Ok(());
    }
    say!("adding the standard library of {} to rustup's toolchain", machine.triple);
    run_quietly(Command::new("rustup").args(["target", "add", machine.triple]), context.options.verbose)
        .with_context(|| format!("Rust's standard library for {} is not available", machine.triple))
}

/// Installs the standard library, and the C compiler, which also links.
///
/// # Errors
/// If one of them cannot be installed.
pub fn set_up(context: &Context, machine: &Machine) -> anyhow::Result<()> {
    set_up_library(context, machine)?;
    let (linker, names) = machine.linker;
    if on_path(linker).is_none() {
        let packages: Vec<Package> = names.iter().map(|name| Package::new(*name, "links for arm64")).collect();
        packages::install(context, &packages)?;
    }
    Ok(())
}

/// Installs the emulator that runs the machine's programs here.
///
/// # Errors
/// If it cannot be installed.
pub fn set_up_emulator(context: &Context, machine: &Machine) -> anyhow::Result<()> {
    let (emulator, package, _) = machine.emulator;
    if on_path(emulator).is_some() {
        return Ok(());
    }
    packages::install(context, &[Package::new(package, "runs the unit tests of another machine")])
}

/// Whether this cargo can compile for the machine without installing anything.
fn has_standard_library(machine: &Machine) -> bool {
    let libraries = read(Command::new("rustc").args(["--print", "target-libdir", "--target", machine.triple]));
    libraries.is_ok_and(|dir| Path::new(dir.trim()).is_dir())
}
