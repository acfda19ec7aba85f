//! Option values that are chosen from names defined elsewhere. Completions and `--help` list them.

use std::ffi::OsStr;
use std::fmt::Display;
use std::str::FromStr;

use clap::builder::{PossibleValue, TypedValueParser};
use clap::{Arg, Command};
use heapbpf_profile::formats::FORMATS;
use heapbpf_profile::group::GroupBy;
use heapbpf_profile::report::By;
use heapbpf_profile::value::Value;

use super::values::parse_value;

/// A parser of names. Its function decides what it accepts, and what it says about other words.
#[derive(Clone)]
pub struct Names<T> {
    names: Vec<&'static str>,
    parse: fn(&str) -> Result<T, String>,
}

impl<T: Clone + Send + Sync + 'static> TypedValueParser for Names<T> {
    type Value = T;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<T, clap::Error> {
        self.parse.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.names.iter().copied().map(PossibleValue::new)))
    }
}

/// What stacks can be grouped by.
pub fn groups() -> Names<GroupBy> {
    Names { names: GroupBy::ALL.map(GroupBy::name).into(), parse: parsed }
}

/// What a table can have rows for.
pub fn tables() -> Names<By> {
    Names { names: By::ALL.map(By::name).into(), parse: parsed }
}

/// Values of a profile.
pub fn values() -> Names<Value> {
    Names { names: Value::ALL.map(Value::name).into(), parse: parse_value }
}

/// Formats in which profiles are written. They are checked where a file's extension may choose them as well.
pub fn formats() -> Names<String> {
    Names { names: FORMATS.iter().map(|format| format.name()).collect(), parse: parsed }
}

/// The same formats, and those that only `heapbpf report` has: text tables and plots.
pub fn report_formats() -> Names<String> {
    let names = formats().names;
    Names { names: [&["text"], names.as_slice(), &["png"]].concat(), parse: parsed }
}

fn parsed<T: FromStr<Err: Display>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error: T::Err| error.to_string())
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _};

    use crate::cli::args::Cli;

    #[test]
    fn each_listed_name_is_accepted_and_others_are_explained() {
        let mut number = 0;
        for (command, of) in [(&[][..], "record"), (&["report", "x.json"], "report"), (&["diff", "a", "b"], "diff")] {
            let all = Cli::command();
            let found = all.find_subcommand(of).expect("a command");
            for (option, other) in
                [("value", "one of alloc_"), ("group-by", "choose program, pid"), ("by", "choose stack")]
            {
                let Some(arg) = found.get_arguments().find(|arg| arg.get_long() == Some(option)) else { continue };
                let values = arg.get_possible_values();
                assert!(values.len() >= 4, "{of} --{option}");
                let words = |value: &str| [&["heapbpf"], command, &[&format!("--{option}={value}")]].concat().join(" ");
                for value in &values {
                    let words = words(value.get_name());
                    Cli::try_parse_from(words.split(' ')).unwrap_or_else(|error| panic!("{words}: {error}"));
                    number += 1;
                }
                let error = Cli::try_parse_from(words("nonsense").split(' ')).unwrap_err().to_string();
                assert!(error.contains(other), "{error}");
            }
        }
        assert!(number > 30, "{number}");
        Cli::try_parse_from(["heapbpf", "--group-by", "process"]).expect("another name of pid");
    }
}
