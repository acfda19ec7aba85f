//! Support for what needs a nightly toolchain: Rust's interpreter, and fuzzing with coverage.

use std::process::{Command, Stdio};

use anyhow::bail;

use crate::context::Context;
use crate::shell::run;

/// Fails, with a message on what to do, unless rustup has a nightly toolchain on which `cargo SUBCOMMAND` runs, such as
/// `miri`.
pub fn require(subcommand: &str, components: &str) -> anyhow::Result<()> {
    if has(subcommand) {
        return Ok(());
    }
    let with = if components.is_empty() { String::new() } else { format!(" --component {components}") };
    bail!(
        "nothing was run: rustup has no nightly toolchain with what this needs. Install it with `rustup toolchain install \
         nightly --profile minimal{with}`, for which rustup must reach static.rust-lang.org"
    );
}

/// Whether rustup has a nightly toolchain on which `cargo SUBCOMMAND` runs.
pub fn has(subcommand: &str) -> bool {
    let mut command = cargo();
    command.args([subcommand, "--version"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Returns the nightly's cargo, without the toolchain variables that a cargo running xtask passes on.
pub fn cargo() -> Command {
    let mut command = Command::new("cargo");
    command.arg("+nightly");
    for variable in ["RUSTUP_TOOLCHAIN", "CARGO", "RUSTC", "RUSTDOC"] {
        command.env_remove(variable);
    }
    command
}

/// Packages, flags of the interpreter, and which of their tests are skipped or selected (`--skip NAME`, or the
/// beginning of a name).
///
/// The pure crates forbid unsafe code, so there is nothing of ours to find in them. But they pass foreign bytes to
/// other people's unsafe code: decompressors, and the casts that zerocopy derives, for example for the ABI's records.
/// All other unsafe code calls the kernel (ptrace, bpf, mmap of a shared file) or is BPF programs or assembler. The
/// interpreter cannot run these.
///
/// Left out are comparisons with floating point, which the interpreter makes inexact on purpose, and tests with many
/// rounds, such as those of the filter, of draws and of changed bytes, which would not end within minutes.
const TESTS: &[(&str, &str, &[&str])] = &[
    ("sampler-ebpf", FILES, &["--skip", "agree_with_floating_point", "abi::", "bits::", "constants::", "glob::"]),
    ("heapbpf-elf", FILES, &["--skip", "fuzzed", "--skip", "hostile"]),
    ("heapbpf-python", NEWER_RULES, &["code::", "debug_offsets::", "frames::", "layout::", "lines::"]),
];

/// These tests read files.
const FILES: &str = "-Zmiri-disable-isolation";
/// iced-x86 1.22 violates the older of the interpreter's two sets of borrowing rules. With the newer one, it takes
/// several times as long.
const NEWER_RULES: &str = "-Zmiri-disable-isolation -Zmiri-tree-borrows";

/// `cargo xtask miri`: runs tests of the ABI, and of readers of foreign bytes, in Rust's interpreter, which reports
/// undefined behaviour. Needs rustup's nightly with the components `miri` and `rust-src`.
///
/// # Errors
/// A test failed, or the toolchain has no interpreter.
pub fn miri(context: &Context) -> anyhow::Result<()> {
    require("miri", "miri,rust-src")?;
    for (package, flags, tests) in TESTS {
        let mut command = cargo();
        command.current_dir(&context.root).args(["miri", "test", "--locked", "--lib", "--package", package]);
        command.arg("--").args(*tests);
        command.env("CARGO_TARGET_DIR", context.target().join("miri")).env("MIRIFLAGS", flags);
        run(&mut command, context.options.verbose)?;
    }
    Ok(())
}
