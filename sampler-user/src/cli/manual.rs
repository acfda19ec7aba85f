//! What the command line offers about itself: completions, man pages, and the first steps.

use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::Context as _;
use clap::{Arg, Command, CommandFactory as _, ValueHint};
use clap_complete::Shell;
use clap_mangen::Man;
use heapbpf_profile::units;

use super::args::{Cli, CompletionArgs, ManArgs};

/// What `heapbpf` prints on a terminal if it is started without arguments.
pub const FIRST_STEPS: &str = "\
heapbpf shows which code of running programs allocates and holds memory:
  sudo heapbpf demo                      a program with a leak, for five seconds
  sudo heapbpf --pid PID -d 10s          a program that is already running
  sudo heapbpf -d 10s -- COMMAND         a program from its start, and what it starts
  sudo heapbpf --all -d 30s              every program on this host
  heapbpf doctor                         what can be recorded here (options: heapbpf -h)
";

/// Prints the completions of a shell.
///
/// # Errors
/// Standard output cannot be written.
pub fn completions(args: &CompletionArgs) -> anyhow::Result<u8> {
    let script = script(args.shell);
    match io::stdout().write_all(&script) {
        // The reader has read all that it wanted.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(0),
        written => written.context("cannot write to standard output").map(|()| 0),
    }
}

fn script(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut without_files(Cli::command()), "heapbpf", &mut script);
    script
}

/// The command with file name completion switched off for values that are not files: numbers, times, patterns.
fn without_files(command: Command) -> Command {
    let hint = |arg: Arg| {
        // A command to start is a file as well.
        let is_unknown = arg.get_value_hint() == ValueHint::Unknown && !arg.is_last_set();
        if is_unknown && arg.get_action().takes_values() { arg.value_hint(ValueHint::Other) } else { arg }
    };
    command.mut_args(hint).mut_subcommands(without_files)
}

/// Writes the man pages.
///
/// # Errors
/// The directory cannot be written.
pub fn pages(args: &ManArgs) -> anyhow::Result<u8> {
    let dir = args.dir.display();
    std::fs::create_dir_all(&args.dir).with_context(|| format!("cannot create {dir}"))?;
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    write_pages(&command, &args.dir).with_context(|| format!("cannot write pages to {dir}"))?;
    Ok(0)
}

/// Writes the pages of a command and of its subcommands.
fn write_pages(command: &Command, dir: &Path) -> io::Result<()> {
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        write_pages(below, dir)?;
    }
    let page = Man::new(command.clone()).date(date());
    let mut text = Vec::new();
    page.render(&mut text)?;
    std::fs::write(dir.join(page.get_filename()), tidied(&String::from_utf8_lossy(&text)))
}

/// Returns the date of the source that releases are built with. Otherwise empty, because pages must not depend on when
/// they are written.
fn date() -> String {
    let seconds = option_env!("SOURCE_DATE_EPOCH").and_then(|seconds| seconds.trim().parse().ok());
    let time = seconds.and_then(|seconds| UNIX_EPOCH.checked_add(Duration::from_secs(seconds)));
    time.map_or(String::new(), |time| units::rfc3339(time).chars().take("2026-01-01".len()).collect())
}

/// Fixes what man page readers warn about: empty lines between breaks, trailing spaces, and a title whose empty fields
/// are missing, so that the version takes the place of the date.
fn tidied(page: &str) -> String {
    let page = page.replace("\n.br\n\n.br\n", "\n.sp\n");
    let line = |line: &str| {
        let line = line.trim_end_matches(' ');
        if line.starts_with(".TH ") { line.replace("  ", " \"\" ") + "\n" } else { format!("{line}\n") }
    };
    page.lines().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shell_completes_commands_and_options() {
        for shell in [Shell::Bash, Shell::Elvish, Shell::Fish, Shell::PowerShell, Shell::Zsh] {
            let script = String::from_utf8(script(shell)).expect("text");
            for word in ["doctor", "interval", "heapbpf"] {
                assert!(script.contains(word), "{shell}: no {word}");
            }
            assert!(!script.contains("measuring"), "{shell}: names what is not for users");
        }
    }

    #[test]
    fn pages_have_their_fields_in_place() {
        let title = ".TH heapbpf 1  \"heapbpf 0.1.0\" \n.SH SYNOPSIS\nfull \n.br\n\n.br\nx\n";
        assert_eq!(tidied(title), ".TH heapbpf 1 \"\" \"heapbpf 0.1.0\"\n.SH SYNOPSIS\nfull\n.sp\nx\n");
        let day = ".TH heapbpf 1 2026\\-11\\-27 \"heapbpf 0.1.0\" \n";
        assert_eq!(tidied(day).trim_end(), day.trim_end());
    }

    #[test]
    fn each_command_has_a_page() {
        let dir = tempfile::tempdir().expect("a directory");
        pages(&ManArgs { dir: dir.path().join("man1") }).expect("pages");
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let name = format!("man1/heapbpf-{}.1", command.get_name());
            let page =
                std::fs::read_to_string(dir.path().join(&name)).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(page.contains(".SH NAME") && page.contains(command.get_name()), "{page}");
        }
        let main = std::fs::read_to_string(dir.path().join("man1/heapbpf.1")).expect("the main page");
        assert!(main.contains("\\-\\-interval"), "{main}");
    }
}
