//! `-h`: the options of everyday use and examples. `--help` has all options.

use clap::{Arg, Command, CommandFactory};

use super::args::Cli;

/// Options of recordings that `-h` shows.
const RECORDING: &[&str] = &[
    "pid",
    "all",
    "comm",
    "cgroup",
    "container",
    "no-follow",
    "duration",
    "interval",
    "output",
    "every",
    "hook",
    "max-overhead",
    "listen",
    "all-frames",
    "quiet",
    "verbose",
    "help",
    "version",
];
const SERVICE: &[&str] = &[
    "pid",
    "all",
    "comm",
    "cgroup",
    "container",
    "no-follow",
    "interval",
    "hook",
    "max-overhead",
    "listen",
    "token-file",
    "push",
    "push-every",
    "tls-cert",
    "tls-key",
    "verbose",
    "help",
];
const TOP: &[&str] = &[
    "pid",
    "all",
    "comm",
    "cgroup",
    "container",
    "no-follow",
    "interval",
    "hook",
    "max-overhead",
    "refresh",
    "token-file",
    "all-frames",
    "color",
    "verbose",
    "help",
];
const REPORT: &[&str] = &[
    "details",
    "suspects",
    "by",
    "tree",
    "callers",
    "focus",
    "ignore",
    "top",
    "value",
    "at",
    "group-by",
    "output",
    "format",
    "plot",
    "symbolize",
    "all-frames",
    "full-names",
    "help",
];

/// Subcommands with many options, and what `-h` shows of them.
const SUBCOMMANDS: [(&str, &[&str]); 4] = [("record", RECORDING), ("serve", SERVICE), ("top", TOP), ("report", REPORT)];

const EXAMPLES: &str = "\
Examples:
  sudo heapbpf --pid 1234                          what a process holds, by its functions; until Ctrl-C
  sudo heapbpf --all --duration 30s -o host.json   the whole host
  sudo heapbpf -- ./program args                   from its first allocation
  sudo heapbpf serve --all --listen 127.0.0.1:6060 a page, pprof and metrics, for as long as it runs
  heapbpf report host.json --suspects              leak suspects of a file that was recorded

--help has all options.";

/// The command line, with short help.
pub fn command() -> Command {
    let command = shortened(Cli::command(), RECORDING).after_help(EXAMPLES).after_long_help("");
    SUBCOMMANDS
        .into_iter()
        .fold(command, |command, (name, shown)| command.mut_subcommand(name, |it| shortened(it, shown)))
}

fn shortened(command: Command, shown: &'static [&'static str]) -> Command {
    let is_shown = |arg: &Arg| arg.is_positional() || arg.get_long().is_some_and(|name| shown.contains(&name));
    command.mut_args(|arg| if is_shown(&arg) { arg } else { arg.hide_short_help(true) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_help_has_at_most_18_options_and_each_exists() {
        let mut all = command();
        all.build();
        let of =
            |name: &str| if name.is_empty() { all.clone() } else { all.find_subcommand(name).expect(name).clone() };
        for (name, shown) in std::iter::once(("", RECORDING)).chain(SUBCOMMANDS) {
            let mut command = of(name);
            let help = command.render_help().to_string();
            let options = help.lines().filter(|line| line.starts_with("  -") || line.starts_with("      --")).count();
            assert!((10..=18).contains(&options), "{name}: {options}\n{help}");
            let is_there = |long: &&&str| command.get_arguments().any(|arg| arg.get_long() == Some(long));
            let missing: Vec<_> = shown.iter().filter(|long| !is_there(long) && **long != "version").collect();
            assert!(missing.is_empty(), "{name}: {missing:?}");
            let long = command.render_long_help().to_string();
            assert!(long.contains("--no-live") || name == "report", "{name}: all are in the long help");
        }
        let help = of("").render_help().to_string();
        assert_eq!(
            help.lines().filter(|line| line.starts_with("  sudo heapbpf") || line.starts_with("  heapbpf ")).count(),
            5,
            "{help}"
        );
    }
}
