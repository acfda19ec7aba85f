//! Building for another machine than this one: what that needs, and where it comes from.

use std::path::Path;
use std::process::Command;

use anyhow::Context as _;

use crate::context::{Context, on_path};
use crate::packages::{self, Package};
use crate::shell::{read, run_quietly, say};

/// A machine that can be built for from others.
#[derive(Debug, PartialEq, Eq)]
pub struct Machine {
    /// Rust's name of the target.
    pub triple: &'static str,
    /// What `target_arch` is there, and `bpf_target_arch` in the BPF programs.
    pub architecture: &'static str,
    /// The compiler of Debian that links for it, its packages.
    linker: (&'static str, &'static [&'static str]),
    /// What runs its programs here, the package, and where their libraries are.
    emulator: (&'static str, &'static str, &'static str),
}

/// All of them. One more is one entry here, and one module beside each that is named after an architecture.
const MACHINES: &[Machine] = &[Machine {
    triple: "aarch64-unknown-linux-gnu",
    architecture: "aarch64",
    linker: ("aarch64-linux-gnu-gcc", &["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"]),
    emulator: ("qemu-aarch64-static", "qemu-user-static", "/usr/aarch64-linux-gnu"),
}];

/// Those that are not this one.
pub fn others() -> impl Iterator<Item = &'static Machine> {
    MACHINES.iter().filter(|machine| machine.architecture != std::env::consts::ARCH)
}

/// The machine of that name, `None` if it is this one.
///
/// # Errors
/// A name that is not known, as a sentence.
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
    /// Installs the standard library, which is enough for checking.
    ///
    /// # Errors
    /// If it cannot be had.
    pub fn set_up_check(&self, context: &Context) -> anyhow::Result<()> {
        if self.has_standard_library() {
            return Ok(());
        }
        say!("adding the standard library of {} to rustup's toolchain", self.triple);
        run_quietly(Command::new("rustup").args(["target", "add", self.triple]), context.options.verbose)
            .with_context(|| format!("Rust's standard library for {} cannot be had", self.triple))
    }

    /// Installs the standard library and the linker.
    ///
    /// # Errors
    /// If one cannot be had.
    pub fn set_up(&self, context: &Context) -> anyhow::Result<()> {
        self.set_up_check(context)?;
        let (linker, names) = self.linker;
        if on_path(linker).is_none() {
            let packages: Vec<Package> = names.iter().map(|name| Package::new(*name, "links for arm64")).collect();
            packages::install(context, &packages)?;
        }
        Ok(())
    }

    /// Installs what runs its programs here.
    ///
    /// # Errors
    /// If it cannot be had.
    pub fn set_up_emulator(&self, context: &Context) -> anyhow::Result<()> {
        let (emulator, package, _) = self.emulator;
        if on_path(emulator).is_some() {
            return Ok(());
        }
        packages::install(context, &[Package::new(package, "runs the unit tests of another machine")])
    }

    /// Whether this cargo can compile for it as things are.
    fn has_standard_library(&self) -> bool {
        let libraries = read(Command::new("rustc").args(["--print", "target-libdir", "--target", self.triple]));
        libraries.is_ok_and(|folder| Path::new(folder.trim()).is_dir())
    }

    /// Makes a call of cargo one for this machine.
    pub fn aim(&self, command: &mut Command) {
        let (emulator, _, libraries) = self.emulator;
        let variable = |what: &str| format!("CARGO_TARGET_{}_{what}", self.triple.replace('-', "_").to_uppercase());
        command.args(["--target", self.triple]);
        command.env(variable("LINKER"), self.linker.0);
        command.env(variable("RUNNER"), format!("{emulator} -L {libraries}"));
        // What tests compile is for that machine too, and they know what emulates them.
        command.env("CC", self.linker.0).env("HEAPBPF_EMULATOR", emulator);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_of_cargo_is_aimed_at_the_machine() {
        let machine = &MACHINES[0];
        let mut command = Command::new("cargo");
        machine.aim(command.arg("build"));
        assert_eq!(
            crate::shell::describe(&command),
            "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
             CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER='qemu-aarch64-static -L /usr/aarch64-linux-gnu' \
             CC=aarch64-linux-gnu-gcc HEAPBPF_EMULATOR=qemu-aarch64-static cargo build --target aarch64-unknown-linux-gnu"
        );
    }

    #[test]
    fn what_is_not_known_is_said_with_what_is() {
        let error = super::machine("sparc64-unknown-linux-gnu").expect_err("not known");
        assert!(error.contains("aarch64-unknown-linux-gnu"), "{error}");
    }
}
