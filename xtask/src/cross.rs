//! The other architectures that heapbpf can be built for, the cargo calls for them, and the tools that these need.

use std::path::Path;
use std::process::Command;

use anyhow::Context as _;

use crate::context::Context;
use crate::packages;
use crate::shell::{on_path, read, run_quietly, say};

/// A machine type that can be built for on another machine.
#[derive(Debug, PartialEq, Eq)]
pub struct Machine {
    /// Rust's target triple.
    pub triple: &'static str,
    /// Its value of `target_arch`, and of `bpf_target_arch` in the BPF programs.
    pub architecture: &'static str,
    /// Debian's cross compiler, which links for it, and its packages.
    pub linker: (&'static str, &'static [&'static str]),
    /// The emulator that runs its programs here, the emulator's package, and the directory of the programs' libraries.
    pub emulator: (&'static str, &'static str, &'static str),
}

/// All supported machines. To add one, add an entry here and a module next to each module that is named after an
/// architecture.
const MACHINES: &[Machine] = &[Machine {
    triple: "aarch64-unknown-linux-gnu",
    architecture: "aarch64",
    linker: ("aarch64-linux-gnu-gcc", &["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"]),
    emulator: ("qemu-aarch64-static", "qemu-user-static", "/usr/aarch64-linux-gnu"),
}];

/// All machines other than the host.
pub fn others() -> impl Iterator<Item = &'static Machine> {
    MACHINES.iter().filter(|machine| machine.architecture != std::env::consts::ARCH)
}

/// The machine with this name; `None` if it is the host.
///
/// # Errors
/// If the name is unknown, a message for the user.
pub fn machine(triple: &str) -> Result<Option<&'static Machine>, String> {
    let known = MACHINES.iter().find(|machine| machine.triple == triple);
    match known {
        Some(machine) if machine.architecture == std::env::consts::ARCH => Ok(None),
        Some(machine) => Ok(Some(machine)),
        None => {
            let names: Vec<&str> = MACHINES.iter().map(|machine| machine.triple).collect();
            Err(format!("no machine that heapbpf is built for; known are {}", names.join(", ")))
        }
    }
}

impl Machine {
    /// Makes a cargo command build for this machine.
    pub fn aim(&self, command: &mut Command) {
        let (emulator, _, libraries) = self.emulator;
        let variable = |what: &str| format!("CARGO_TARGET_{}_{what}", self.triple.replace('-', "_").to_uppercase());
        command.args(["--target", self.triple]);
        command.env(variable("LINKER"), self.linker.0);
        command.env(variable("RUNNER"), format!("{emulator} -L {libraries}"));
        // Programs that the tests compile must be for that machine as well, and the tests need to know the emulator.
        command.env("CC", self.linker.0).env("HEAPBPF_EMULATOR", emulator);
    }
}

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
        let packages: Vec<(&str, &str)> = names.iter().map(|name| (*name, "links for arm64")).collect();
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
    packages::install(context, &[(package, "runs the unit tests of another machine")])
}

/// Whether this cargo can compile for the machine without installing anything.
fn has_standard_library(machine: &Machine) -> bool {
    let libraries = read(Command::new("rustc").args(["--print", "target-libdir", "--target", machine.triple]));
    libraries.is_ok_and(|dir| Path::new(dir.trim()).is_dir())
}
