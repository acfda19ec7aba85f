//! `cargo xtask run`: runs heapbpf itself; without arguments, its demonstration.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::Context as _;

use crate::build;
use crate::context::Context;
use crate::shell::{announce, describe, say};

/// Builds heapbpf and runs it with these arguments, or its demonstration if there are none.
pub fn run(context: &Context, args: &[OsString]) -> anyhow::Result<ExitCode> {
    let binary = build::build(context)?;
    let mut command = as_root(context, &binary)?;
    command.args(heapbpf_arguments(args));
    announce(&command, context.options.verbose);
    // heapbpf replaces the xtask process, so it receives signals directly and the user gets its exit status.
    let error = command.exec();
    Err(error).with_context(|| format!("cannot start {}", describe(&command)))
}

/// Subcommands that are passed to heapbpf as they are. Any other first word is a program to start.
const COMMANDS: &str = "record serve top report diff merge plan census doctor demo completions man help";

/// Returns the user's arguments as heapbpf expects them: without any, those of its demonstration. The `--` of `cargo
/// xtask run -- python3 script.py` ends xtask's options, and heapbpf needs another `--` before a program to start.
fn heapbpf_arguments(args: &[OsString]) -> Vec<&OsStr> {
    let Some(first) = args.first() else { return vec![OsStr::new("demo")] };
    let is_command = |word: &str| COMMANDS.split(' ').any(|command| command == word);
    let is_program = first.to_str().is_none_or(|word| !word.starts_with('-') && !is_command(word));
    is_program.then_some(OsStr::new("--")).into_iter().chain(args.iter().map(OsString::as_os_str)).collect()
}

/// Returns heapbpf, run as root if possible. Otherwise it runs as this user and reports which capability it lacks.
fn as_root(context: &Context, binary: &Path) -> anyhow::Result<Command> {
    if let Some(reason) = context.privilege.refusal() {
        say!("running heapbpf without root: {reason}");
        return Ok(Command::new(binary));
    }
    context.privilege.command("run heapbpf, which loads BPF programs", binary, [])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_to_start_gets_its_two_dashes_and_nothing_else_does() {
        let passed = |line: &str| {
            let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
            let passed = heapbpf_arguments(&words);
            passed.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(passed("python3 script.py --all"), "-- python3 script.py --all");
        assert_eq!(passed("./server"), "-- ./server");
        assert_eq!(passed("-- python3 script.py"), "-- python3 script.py");
        assert_eq!(passed("--pid 12 -d 5s"), "--pid 12 -d 5s");
        assert_eq!(passed("--duration 5s -- ls"), "--duration 5s -- ls");
        assert_eq!(passed("report old.json"), "report old.json");
        assert_eq!(passed("env LANG=C ls"), "-- env LANG=C ls");
        assert_eq!(passed(""), "demo");
    }
}
