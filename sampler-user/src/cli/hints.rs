//! Suggestions for words on the command line that are not understood.

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Adds a suggestion to the error if an unknown word is not an option: it is probably a process ID or a program.
pub fn explained(mut error: clap::Error) -> clap::Error {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg) else { return error };
    if error.kind() != ErrorKind::UnknownArgument || word.starts_with('-') {
        return error;
    }
    let tip: StyledStr = match word.parse::<u32>() {
        Ok(pid) => format!("to profile process {pid}, use '--pid {pid}'").into(),
        Err(_) => format!("to start a program and profile it, use '-- {word}'").into(),
    };
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::Cli;
    use clap::Parser;

    fn message(words: &[&str]) -> String {
        explained(Cli::try_parse_from(words).unwrap_err()).to_string()
    }

    #[test]
    fn a_word_without_an_option_is_a_process_or_a_program() {
        assert!(message(&["heapbpf", "1234"]).contains("use '--pid 1234'"), "{}", message(&["heapbpf", "1234"]));
        assert!(message(&["heapbpf", "./server"]).contains("use '-- ./server'"));
        let misspelt = message(&["heapbpf", "--intervall", "5"]);
        assert!(misspelt.contains("'--interval'") && !misspelt.contains("to start"), "{misspelt}");
    }
}
