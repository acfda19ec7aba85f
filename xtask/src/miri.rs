//! `cargo xtask miri`: runs tests of the ABI, and of readers of foreign bytes, in Rust's interpreter, which reports
//! undefined behaviour.

use crate::context::Context;
use crate::nightly;
use crate::shell::run;

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
