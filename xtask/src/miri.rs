//! `cargo xtask miri`: runs tests of the ABI in Rust's interpreter, which reports undefined behaviour.

use crate::context::Context;
use crate::nightly;
use crate::shell::run;

/// Packages, and what is left out of their tests or selected (`--skip NAME`, or the beginning of a name).
///
/// The pure crates forbid unsafe code, so there is nothing of ours to find in them. The ABI has none either, but its records
/// are cast from bytes by the `unsafe` code that zerocopy derives. Everything else that is unsafe calls the kernel (ptrace,
/// bpf, mmap of a shared file), is the BPF programs or assembler, which the interpreter cannot run.
///
/// Left out: what compares with floating point, which the interpreter makes inexact on purpose, and tests of many
/// rounds, such as those of the filter and of draws, which do not end in it within minutes.
const TESTS: &[(&str, &[&str])] =
    &[("sampler-ebpf", &["--skip", "agree_with_floating_point", "abi::", "bits::", "constants::", "glob::"])];

/// Runs the tests. Needs rustup's nightly with the components `miri` and `rust-src`.
///
/// # Errors
/// A test failed, or the toolchain has no interpreter.
pub fn miri(context: &Context) -> anyhow::Result<()> {
    nightly::require("miri", "miri,rust-src")?;
    for (package, tests) in TESTS {
        let mut command = nightly::cargo();
        command.current_dir(&context.root).args(["miri", "test", "--locked", "--lib", "--package", package]);
        command.arg("--").args(*tests);
        command.env("CARGO_TARGET_DIR", context.target().join("miri"));
        run(&mut command, context.options.verbose)?;
    }
    Ok(())
}
