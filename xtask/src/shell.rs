//! Finds and runs other programs. Commands are printed with `-v` and always checked. Output is hidden if the caller
//! asks for that.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use anyhow::{Context as _, bail};

/// Prints a message of xtask on standard error.
macro_rules! say {
    ($($word:tt)*) => { eprintln!("xtask: {}", format_args!($($word)*)) };
}
pub(crate) use say;

/// Returns the cargo that runs this xtask, or else the one on the PATH.
pub fn host_cargo() -> PathBuf {
    env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

/// Finds a command on the PATH.
pub fn on_path(command: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?).map(|dir| dir.join(command)).find(|path| is_executable(path))
}

/// Whether the path is a file that someone may execute.
pub fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// Runs a command on the user's terminal. Fails unless it succeeds.
pub fn run(command: &mut Command, verbose: bool) -> anyhow::Result<()> {
    if succeeds(command, verbose)? { Ok(()) } else { bail!("this command failed: {}", describe(command)) }
}

/// Runs a command on the user's terminal. Returns whether it succeeded. Fails only if it cannot be started.
pub fn succeeds(command: &mut Command, verbose: bool) -> anyhow::Result<bool> {
    announce(command, verbose);
    let status = command.status().with_context(|| format!("cannot start {}", describe(command)))?;
    Ok(status.success())
}

/// Runs a command and prints its output only if it fails. With `-v`, prints the output as it runs.
pub fn run_quietly(command: &mut Command, verbose: bool) -> anyhow::Result<()> {
    if verbose {
        return run(command, verbose);
    }
    let output = capture(command)?;
    if output.status.success() {
        return Ok(());
    }
    eprint!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    bail!("this command failed ({}): {}", output.status, describe(command))
}

/// Returns the standard output of a command, if it succeeds.
pub fn read(command: &mut Command) -> anyhow::Result<String> {
    let output = capture(command)?;
    if !output.status.success() {
        bail!("{} failed: {}", describe(command), String::from_utf8_lossy(&output.stderr).trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("{} wrote something that is not UTF-8", describe(command)))
}

fn capture(command: &mut Command) -> anyhow::Result<Output> {
    command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {}", describe(command)))
}

/// A child process that is killed when this value is dropped.
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail only if the child has already exited, which is fine.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// With `-v`, prints a command that is about to run.
pub fn announce(command: &Command, verbose: bool) {
    if verbose {
        say!("+ {}", describe(command));
    }
}

/// A command as a user would type it: variables, program, arguments.
pub fn describe(command: &Command) -> String {
    let variables = command.get_envs().filter_map(|(name, value)| {
        let value = value?;
        Some(format!("{}={}", name.to_string_lossy(), quote(&value.to_string_lossy())))
    });
    let words =
        std::iter::once(command.get_program()).chain(command.get_args()).map(|word| quote(&word.to_string_lossy()));
    variables.chain(words).collect::<Vec<_>>().join(" ")
}

fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}
