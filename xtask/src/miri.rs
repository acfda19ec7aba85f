//! `cargo xtask miri`: runs tests of the ABI, and of readers of foreign bytes, in Rust's interpreter, which reports undefined behaviour.

use crate::context::Context;
use crate::nightly;
use crate::shell::run;

/// Packages, flags of the interpreter, and what is left out of their tests or selected (`--skip NAME`, or the beginning of a name).
///
/// The pure crates forbid unsafe code, so there is nothing of ours to find in them, but they hand foreign bytes to others'
/// code that has some: decompressors, and the casts that zerocopy derives, as for the records of the ABI. Everything else that
/// is unsafe calls the kernel (ptrace, bpf, mmap of a shared file), is the BPF programs or assembler, which the interpreter
/// cannot run.
///
/// Left out: what compares with floating point, which the interpreter makes inexact on purpose, and tests of many
/// rounds, such as those of the filter, of draws and of changed bytes, which do not end in it within minutes.
const TESTS: &[(&str, &str, &[&str])] = &[
    ("sampler-ebpf", FILES, &["--skip", "agree_with_floating_point", "abi::", "bits::", "constants::", "glob::"]),
    ("heapbpf-elf", FILES, &["--skip", "fuzzed", "--skip", "hostile"]),
    ("heapbpf-python", NEWER_RULES, &["code::", "debug_offsets::", "frames::", "layout::", "lines::"]),
];

/// Tests read files.
const FILES: &str = "-Zmiri-disable-isolation";
/// iced-x86 1.22 does not keep the older one of the two sets of rules that the interpreter has for borrows. By the newer one it
/// takes several times as long.
const NEWER_RULES: &str = "-Zmiri-disable-isolation -Zmiri-tree-borrows";

/// Runs the tests. Needs rustup's nightly with the components `miri` and `rust-src`.
///
/// # Errors
/// A test failed, or the toolchain has no interpreter.
pub fn miri(context: &Context) -> anyhow::Result<()> {
    nightly::require("miri", "miri,rust-src")?;
    for (package, flags, tests) in TESTS {
        let mut command = nightly::cargo();
        command.current_dir(&context.root).args(["miri", "test", "--locked", "--lib", "--package", package]);
        command.arg("--").args(*tests);
        command.env("CARGO_TARGET_DIR", context.target().join("miri")).env("MIRIFLAGS", flags);
        run(&mut command, context.options.verbose)?;
    }
    Ok(())
}
