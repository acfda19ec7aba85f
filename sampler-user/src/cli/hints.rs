//! Suggestions for unknown words on the command line.

use std::ffi::OsString;

use clap::CommandFactory as _;
use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use super::args::Cli;

/// The words of the command line, with `heapbpf report --suspects FILE` for `heapbpf suspects FILE`.
pub fn guessed(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut words: Vec<OsString> = words.collect();
    if words.get(1).is_some_and(|word| word == "suspects") {
        drop(words.splice(1..2, ["report".into(), "--suspects".into()]));
    }
    words
}

/// Adds a suggestion to the error if a word is unknown. It may be a misspelt option or command, a process ID, or a
/// program.
pub fn explained(mut error: clap::Error) -> clap::Error {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg) else { return error };
    if error.kind() != ErrorKind::UnknownArgument {
        return error;
    }
    if word.starts_with('-') {
        let near = word.strip_prefix("--").and_then(|word| similar_option(&error, word));
        return of_option(error, near);
    }
    let tip: StyledStr = match (word.parse::<u32>(), similar_command(word)) {
        (Ok(pid), _) => format!("to profile process {pid}, use '--pid {pid}'").into(),
        (Err(_), _) if is_a_view(word) => format!("to show this for a profile, use 'report --{word}'").into(),
        (Err(_), Some(command)) => format!("there is a command '{command}'").into(),
        (Err(_), None) => format!("to start a program and profile it, use '-- {word}'").into(),
    };
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
    error
}

/// Suggests an option. Drops the suggestion to put `--` before the unknown one, which would start a command of that
/// name.
fn of_option(mut error: clap::Error, near: Option<String>) -> clap::Error {
    if let Some(ContextValue::StyledStrs(mut tips)) = error.remove(ContextKind::Suggested) {
        tips.retain(|tip| !tip.to_string().starts_with("to pass"));
        if !tips.is_empty() {
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
        }
    }
    if let Some(near) = near.filter(|_| error.get(ContextKind::SuggestedArg).is_none()) {
        error.insert(ContextKind::SuggestedArg, ContextValue::String(format!("--{near}")));
    }
    error
}

/// Returns the option that a misspelt one probably means, of the command in the error's usage line.
fn similar_option(error: &clap::Error, word: &str) -> Option<String> {
    let mut cli = Cli::command();
    cli.build();
    let usage = error.get(ContextKind::Usage).map(ToString::to_string).unwrap_or_default();
    let name = usage.lines().next().and_then(|line| line.split(' ').nth(2)).unwrap_or_default();
    let command = cli.find_subcommand(name).unwrap_or(&cli);
    let options = command.get_arguments().filter(|arg| !arg.is_hide_set());
    nearest(word, options.filter_map(clap::Arg::get_long))
}

/// Returns the command that a misspelt word probably means.
fn similar_command(word: &str) -> Option<String> {
    let cli = Cli::command();
    let names = cli.get_subcommands().filter(|command| !command.is_hide_set()).map(clap::Command::get_name);
    nearest(word, names)
}

/// Whether a word is an option of `heapbpf report`, such as `tree`.
fn is_a_view(word: &str) -> bool {
    let cli = Cli::command();
    cli.find_subcommand("report").is_some_and(|report| report.get_arguments().any(|arg| arg.get_long() == Some(word)))
}

/// Returns the name that is most similar to a word, if any is similar enough.
fn nearest<'a>(word: &str, names: impl Iterator<Item = &'a str>) -> Option<String> {
    let near = names.map(|name| (strsim::osa_distance(word, name), name)).min()?;
    (near.0 <= 2 && near.0 * 2 < word.chars().count()).then(|| near.1.to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn message(words: &[&str]) -> String {
        explained(Cli::try_parse_from(words).unwrap_err()).to_string()
    }

    #[test]
    fn a_misspelt_command_is_recognised() {
        for (word, command) in [("recrod", "record"), ("serv", "serve"), ("reprot", "report"), ("docter", "doctor")] {
            let text = message(&["heapbpf", word]);
            assert!(text.contains(&format!("there is a command '{command}'")), "{text}");
        }
        for word in ["python3", "ls", "./record-it"] {
            assert!(message(&["heapbpf", word]).contains("to start a program"), "{word}");
        }
    }

    #[test]
    fn a_misspelt_option_is_recognised_and_starts_no_command() {
        for (words, option) in [
            (&["heapbpf", "--pdi", "3"][..], "--pid"),
            (&["heapbpf", "--formt", "json"], "--format"),
            (&["heapbpf", "report", "--toop=3", "x"], "--top"),
            (&["heapbpf", "record", "--pdi=3"], "--pid"),
            (&["heapbpf", "report", "--pdi", "x"], ""),
            (&["heapbpf", "--nosuch"], ""),
            (&["heapbpf", "-d", "-1s", "--all"], ""),
        ] {
            let text = message(words);
            let tips: Vec<&str> = text.lines().filter_map(|line| line.trim_start().strip_prefix("tip: ")).collect();
            let expected = (!option.is_empty()).then(|| format!("a similar argument exists: '{option}'"));
            assert_eq!(tips, expected.as_slice(), "{words:?}: {text}");
        }
        assert!(message(&["heapbpf", "--pid", "-1"]).contains("process ids are above 0"));
    }

    #[test]
    fn a_word_without_an_option_is_a_process_or_a_program() {
        assert!(message(&["heapbpf", "1234"]).contains("use '--pid 1234'"), "{}", message(&["heapbpf", "1234"]));
        assert!(message(&["heapbpf", "tree", "x.json"]).contains("use 'report --tree'"));
        let words = guessed(["heapbpf", "suspects", "x.json"].into_iter().map(OsString::from));
        assert_eq!(words, ["heapbpf", "report", "--suspects", "x.json"]);
        let words = guessed(["heapbpf", "--comm", "suspects"].into_iter().map(OsString::from));
        assert_eq!(words, ["heapbpf", "--comm", "suspects"]);
        assert!(message(&["heapbpf", "./server"]).contains("use '-- ./server'"));
        let misspelt = message(&["heapbpf", "--intervall", "5"]);
        assert!(misspelt.contains("'--interval'") && !misspelt.contains("to start"), "{misspelt}");
    }
}
