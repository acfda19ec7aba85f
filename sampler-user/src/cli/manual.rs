//! What the command line says about itself: help, completions, man pages, and the first steps.

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::Context as _;
use clap::{Arg, ArgAction, Command, CommandFactory, ValueHint};
use clap_complete::Shell;
use clap_mangen::Man;
use heapbpf_profile::units;

use super::args::{Cli, CompletionArgs, ManArgs};
use super::compare::print;

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
    print(&String::from_utf8_lossy(&script(args.shell)))
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

/// Options of recordings that `-h` shows.
const RECORDING: &str = "pid all comm cgroup container no-follow duration interval output every hook max-overhead \
                         listen all-frames quiet verbose help version";
const SERVICE: &str = "pid all comm cgroup container no-follow interval hook max-overhead listen token-file push \
                       push-every tls-cert tls-key verbose help";
const TOP: &str = "pid all comm cgroup container no-follow interval hook max-overhead refresh token-file all-frames \
                   color verbose help";
const PLAN: &str = "pid all comm cgroup container no-follow duration interval plot hook json color help";
const REPORT: &str = "details suspects by tree callers focus ignore top value at group-by output format plot symbolize \
                      all-frames full-names help";

/// Options of recordings that are for experts. Only `--help-all` shows them.
const EXPERT: &str = "alloc calibrate confidence criterion link live-max max-debug-bytes max-depth ring-bytes seed \
                      stack-bytes stacks-max unwind";
const HELP_ALL: &str = "help-all";

/// Subcommands with many options, and the options that `-h` shows.
const SUBCOMMANDS: [(&str, &str); 5] =
    [("record", RECORDING), ("serve", SERVICE), ("top", TOP), ("plan", PLAN), ("report", REPORT)];

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
            assert!(long.contains("--no-live") || ["plan", "report"].contains(&name), "{name}: {long}");
            // A word that stands for an option of experts.
            assert!(!help.contains("criterion"), "{name}: {help}");
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
