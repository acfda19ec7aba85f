//! Suggestions for words on the command line that are not understood.

use clap::CommandFactory as _;
use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use super::args::Cli;

/// Adds a suggestion to the error if an unknown word is not an option: it is probably a process ID or a program.
pub fn explained(mut error: clap::Error) -> clap::Error {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg) else { return error };
    if error.kind() != ErrorKind::UnknownArgument || word.starts_with('-') {
        return error;
    }
    let tip: StyledStr = match (word.parse::<u32>(), similar_command(word)) {
        (Ok(pid), _) => format!("to profile process {pid}, use '--pid {pid}'").into(),
        (Err(_), Some(command)) => format!("there is a command '{command}'").into(),
        (Err(_), None) => format!("to start a program and profile it, use '-- {word}'").into(),
    };
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
    error
}

/// The command that a misspelt word probably means.
fn similar_command(word: &str) -> Option<String> {
    let cli = Cli::command();
    let names = cli.get_subcommands().filter(|command| !command.is_hide_set()).map(clap::Command::get_name);
    let near = names.map(|name| (mistakes(word, name), name)).min()?;
    (near.0 <= 2 && near.0 * 2 < word.chars().count()).then(|| near.1.to_owned())
}

/// How many characters have to be inserted, removed, replaced, or swapped with their neighbour to make one word of the
/// other.
fn mistakes(one: &str, other: &str) -> usize {
    let (one, other): (Vec<char>, Vec<char>) = (one.chars().take(32).collect(), other.chars().collect());
    let mut rows = vec![(0..=other.len()).collect::<Vec<usize>>()];
    for i in 1..=one.len() {
        let mut row = vec![i];
        for j in 1..=other.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(one[i - 1] != other[j - 1]);
            let mut least = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && one[i - 1] == other[j - 2] && one[i - 2] == other[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[one.len()][other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

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
        assert_eq!(
            [mistakes("", "abc"), mistakes("abc", "abc"), mistakes("acb", "abc"), mistakes("xbc", "abc")],
            [3, 0, 1, 1]
        );
    }

    #[test]
    fn a_word_without_an_option_is_a_process_or_a_program() {
        assert!(message(&["heapbpf", "1234"]).contains("use '--pid 1234'"), "{}", message(&["heapbpf", "1234"]));
        assert!(message(&["heapbpf", "./server"]).contains("use '-- ./server'"));
        let misspelt = message(&["heapbpf", "--intervall", "5"]);
        assert!(misspelt.contains("'--interval'") && !misspelt.contains("to start"), "{misspelt}");
    }
}
