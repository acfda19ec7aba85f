//! The other architectures that heapbpf can be built for, and the cargo calls for them.

use std::process::Command;

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
