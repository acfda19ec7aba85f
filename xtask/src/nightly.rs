//! Support for what needs a nightly toolchain: Rust's interpreter, and fuzzing with coverage.

use std::process::{Command, Stdio};

use anyhow::bail;

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
