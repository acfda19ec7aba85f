//! `-h` shows everyday options and examples. `--help` shows all options except expert ones. `--help-all` shows those
//! too.

use std::ffi::OsString;

use clap::{Arg, ArgAction, Command, CommandFactory};

use super::args::Cli;

/// Options of recordings that `-h` shows.
const RECORDING: &str = "pid all comm cgroup container no-follow duration interval output every hook max-overhead \
                         listen all-frames quiet verbose help version";
const SERVICE: &str = "pid all comm cgroup container no-follow interval hook max-overhead listen token-file push \
                       push-every tls-cert tls-key verbose help";
const TOP: &str = "pid all comm cgroup container no-follow interval hook max-overhead refresh token-file all-frames \
                   color verbose help";
const REPORT: &str = "details suspects by tree callers focus ignore top value at group-by output format plot symbolize \
                      all-frames full-names help";

/// Options of recordings that are for experts. Only `--help-all` shows them.
const EXPERT: &str = "alloc calibrate confidence criterion link live-max max-debug-bytes max-depth ring-bytes seed \
                      stack-bytes stacks-max unwind";
const HELP_ALL: &str = "help-all";

/// Subcommands with many options, and the options that `-h` shows.
const SUBCOMMANDS: [(&str, &str); 4] = [("record", RECORDING), ("serve", SERVICE), ("top", TOP), ("report", REPORT)];

const EXAMPLES: &str = "\
Examples:
  sudo heapbpf --pid 1234                          what a process holds, by function; until Ctrl-C
  sudo heapbpf --all --duration 30s -o host.json   the whole host
  sudo heapbpf -- ./program args                   a program, from its first allocation
  sudo heapbpf serve --all --listen 127.0.0.1:6060 web page, pprof and metrics, until stopped
  heapbpf report host.json --suspects              leak suspects of a recorded file

--help shows more options, --help-all shows all.";

/// Returns the command line with its help. `wants_all`: includes expert options.
pub fn command(wants_all: bool) -> Command {
    let of = |command, shown| with_all(shortened(command, shown), wants_all);
    let command = of(Cli::command(), RECORDING).after_help(EXAMPLES).after_long_help("");
    SUBCOMMANDS.into_iter().fold(command, |command, (name, shown)| command.mut_subcommand(name, |it| of(it, shown)))
}

/// Whether help with all options is requested. Words after `--` belong to another command.
pub fn wants_all(arguments: impl Iterator<Item = OsString>) -> bool {
    arguments.take_while(|word| word != "--").any(|word| word.to_str().is_some_and(|word| word == "--help-all"))
}

fn with_all(command: Command, wants_all: bool) -> Command {
    let is_expert = |arg: &Arg| arg.get_long().is_some_and(|name| is_in(EXPERT, name));
    let help = Arg::new(HELP_ALL).long(HELP_ALL).action(ArgAction::HelpLong).hide_short_help(true);
    let command = command.arg(help.help("Print help with all options, including those for experts"));
    command.mut_args(|arg| if is_expert(&arg) && !wants_all { arg.hide_long_help(true) } else { arg })
}

/// Whether a name is in a list of names with spaces between them.
fn is_in(names: &str, name: &str) -> bool {
    names.split(' ').any(|listed| listed == name)
}

fn shortened(command: Command, shown: &'static str) -> Command {
    let is_shown = |arg: &Arg| arg.is_positional() || arg.get_long().is_some_and(|name| is_in(shown, name));
    command.mut_args(|arg| if is_shown(&arg) { arg } else { arg.hide_short_help(true) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_help_has_at_most_18_options_and_each_exists() {
        let mut all = command(false);
        all.build();
        let of =
            |name: &str| if name.is_empty() { all.clone() } else { all.find_subcommand(name).expect(name).clone() };
        for (name, shown) in std::iter::once(("", RECORDING)).chain(SUBCOMMANDS) {
            let mut command = of(name);
            let help = command.render_help().to_string();
            let options = help.lines().filter(|line| line.starts_with("  -") || line.starts_with("      --")).count();
            assert!((10..=18).contains(&options), "{name}: {options}\n{help}");
            let is_there = |long: &str| command.get_arguments().any(|arg| arg.get_long() == Some(long));
            let missing: Vec<_> = shown.split(' ').filter(|long| !is_there(long) && *long != "version").collect();
            assert!(missing.is_empty(), "{name}: {missing:?}");
            let long = command.render_long_help().to_string();
            assert!(long.contains("--no-live") || name == "report", "{name}: {long}");
            assert!(!long.contains("--stacks-max"), "{name}: {long}");
        }
        let experts = command(true).render_long_help().to_string();
        let missing: Vec<_> = EXPERT.split(' ').filter(|name| !experts.contains(&format!("--{name}"))).collect();
        assert!(missing.is_empty(), "{missing:?}");
        let asked = |words: &[&str]| wants_all(words.iter().map(OsString::from));
        assert!(asked(&["serve", "--help-all"]) && !asked(&["--", "x", "--help-all"]) && !asked(&["--help"]));
        let help = of("").render_help().to_string();
        assert_eq!(
            help.lines().filter(|line| line.starts_with("  sudo heapbpf") || line.starts_with("  heapbpf ")).count(),
            5,
            "{help}"
        );
    }
}
