//! What a terminal offers of the command line itself: completions, man pages, and the first steps.

use std::io::{self, Write};

use anyhow::Context as _;
use clap::CommandFactory as _;

use super::args::{Cli, CompletionArgs, ManArgs};

/// What `heapbpf` says on a terminal if it is not told what to do.
pub const FIRST_STEPS: &str = "\
heapbpf shows which code of running programs allocates and holds memory:
  sudo heapbpf demo                      a program with a leak, for five seconds
  sudo heapbpf --pid PID -d 10s          a program that runs already
  sudo heapbpf -d 10s -- COMMAND         a program from its start, and what it starts
  sudo heapbpf --all -d 30s              every program on this host
  heapbpf doctor                         what this machine allows (options: --help)
";

/// Prints the completions of a shell.
///
/// # Errors
/// Standard output cannot be written to.
pub fn completions(args: &CompletionArgs) -> anyhow::Result<u8> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "heapbpf", &mut script);
    match io::stdout().write_all(&script) {
        // The reader has what it wanted.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(0),
        written => written.context("standard output").map(|()| 0),
    }
}

/// Writes the man pages.
///
/// # Errors
/// The folder cannot be written to.
pub fn pages(args: &ManArgs) -> anyhow::Result<u8> {
    let folder = args.folder.display();
    std::fs::create_dir_all(&args.folder).with_context(|| format!("{folder} cannot be made"))?;
    clap_mangen::generate_to(Cli::command(), &args.folder)
        .with_context(|| format!("pages cannot be written to {folder}"))?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use clap_complete::Shell;

    use super::*;

    #[test]
    fn every_shell_completes_commands_and_options() {
        for shell in [Shell::Bash, Shell::Elvish, Shell::Fish, Shell::PowerShell, Shell::Zsh] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "heapbpf", &mut script);
            let script = String::from_utf8(script).expect("text");
            for word in ["doctor", "interval", "heapbpf"] {
                assert!(script.contains(word), "{shell}: no {word}");
            }
            assert!(!script.contains("measuring"), "{shell}: names what is not for users");
        }
    }

    #[test]
    fn each_command_has_a_page() {
        let folder = tempfile::tempdir().expect("a folder");
        pages(&ManArgs { folder: folder.path().join("man1") }).expect("pages");
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let name = format!("man1/heapbpf-{}.1", command.get_name());
            let page =
                std::fs::read_to_string(folder.path().join(&name)).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(page.contains(".SH NAME") && page.contains(command.get_name()), "{page}");
        }
        let main = std::fs::read_to_string(folder.path().join("man1/heapbpf.1")).expect("the main page");
        assert!(main.contains("\\-\\-interval"), "{main}");
    }

    #[test]
    fn the_first_steps_fit_on_every_terminal_and_are_understood() {
        use clap::Parser as _;
        assert!(FIRST_STEPS.lines().count() == 6 && FIRST_STEPS.lines().all(|line| line.chars().count() <= 85));
        let commands = FIRST_STEPS.lines().skip(1).filter_map(|line| line.trim_start().split("   ").next());
        for command in commands {
            let words = command.trim_start_matches("sudo ").replace("PID", "1").replace("COMMAND", "true");
            Cli::try_parse_from(words.split(' ')).unwrap_or_else(|error| panic!("{command}: {error}"));
        }
    }
}
