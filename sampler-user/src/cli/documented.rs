//! Tests that the documents and the command line have the same options.

use std::fs;
use std::path::{Path, PathBuf};

use clap::builder::StyledStr;
use clap::{Arg, CommandFactory, Parser};

use super::args::Cli;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A command's options, in the order of its help.
fn options(command: &clap::Command) -> impl Iterator<Item = &Arg> {
    command.get_arguments().filter(|arg| arg.get_long().is_some() && !arg.is_hide_set())
}

/// A command's options by heading, in the order of its help.
fn tables(command: &clap::Command) -> Vec<(&str, Vec<&Arg>)> {
    let mut tables: Vec<(&str, Vec<&Arg>)> = Vec::new();
    for arg in options(command) {
        let title = arg.get_help_heading().unwrap_or("option");
        match tables.iter_mut().find(|(known, _)| *known == title) {
            Some((_, args)) => args.push(arg),
            None => tables.push((title, vec![arg])),
        }
    }
    tables
}

/// Commands with options. Recording is first and needs no name; `serve` has the same options.
fn commands() -> Vec<(String, clap::Command)> {
    let all = Cli::command();
    let others = all.get_subcommands().filter(|it| !it.is_hide_set() && !["record", "serve"].contains(&it.get_name()));
    let others: Vec<_> = others.map(|it| (format!("heapbpf {}", it.get_name()), it.clone())).collect();
    let recording = ("heapbpf, heapbpf record, heapbpf serve".to_owned(), all);
    std::iter::once(recording).chain(others).filter(|(_, command)| options(command).next().is_some()).collect()
}

/// The beginning of an option's table row: ``| `-i`, `--interval SIZE` | 512KiB |``.
fn head(arg: &Arg) -> String {
    let short = arg.get_short().map_or(String::new(), |short| format!("`-{short}`, "));
    let takes_value = arg.get_action().takes_values();
    let names = arg.get_value_names().filter(|_| takes_value).map(|names| names.join(" "));
    let may_lack_it = arg.is_require_equals_set();
    let value =
        names.map_or(String::new(), |names| if may_lack_it { format!("[={names}]") } else { format!(" {names}") });
    let defaults: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy().into_owned()).collect();
    let default = if takes_value { defaults.join(" ") } else { String::new() };
    format!("| {short}`--{}{value}` | {default} |", arg.get_long().unwrap_or_default())
}

/// The rest of the row: the help text and the possible values.
fn meaning(arg: &Arg) -> String {
    let line = |text: &StyledStr| text.to_string().split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|");
    let help = arg.get_help().map(line).unwrap_or_default();
    let values = if arg.get_action().takes_values() { arg.get_possible_values() } else { Vec::new() };
    let values: Vec<String> = values
        .iter()
        .filter(|value| !value.is_hide_set())
        .map(|value| {
            let about = value.get_help().map(line).filter(|about| !about.is_empty());
            format!("`{}`{}", value.get_name(), about.map_or(String::new(), |about| format!(" ({about})")))
        })
        .collect();
    if values.is_empty() { help } else { format!("{help}: {}", values.join(", ")) }
}

/// A table of options under its title.
fn table(title: &str, args: &[&Arg]) -> String {
    let rows: String = args.iter().map(|arg| format!("{} {} |\n", head(arg), meaning(arg))).collect();
    format!("| {title} | default | |\n|---|---|---|\n{rows}")
}

/// Where a command shares a table with recording, the table is only named.
fn document() -> String {
    let mut text = String::from(
        "# Options\n\nEvery option of every command, as `--help-all` has them. Sizes are `4096`, `64k`, `64KiB`, `1MB`, `1MiB`; \
         times `30s`, `5m`.\nThis file is written by `HEAPBPF_BLESS=1 cargo test -p sampler-user --lib cli::documented`.\n",
    );
    let mut of_recording: Vec<String> = Vec::new();
    for (name, command) in commands() {
        let (mut shared, mut own) = (Vec::new(), Vec::new());
        for (title, args) in tables(&command) {
            let table = table(title, &args);
            if of_recording.contains(&table) {
                shared.push(format!("*{title}*"));
            } else {
                own.push(table);
            }
        }
        text += &format!("\n## {name}\n\n");
        if !shared.is_empty() {
            text += &format!("The options of {} are those of a recording, above.\n\n", shared.join(", "));
        }
        text += &own.join("\n");
        if of_recording.is_empty() {
            of_recording = own;
        }
    }
    text
}

/// The names and defaults of options.
fn heads(args: &[&Arg]) -> Vec<String> {
    args.iter().map(|arg| head(arg)).collect()
}

/// Names and defaults must match the command line. The wording may differ until the file is regenerated.
#[test]
fn every_option_is_in_the_documents() {
    let path = root().join("docs/options.md");
    if std::env::var_os("HEAPBPF_BLESS").is_some() {
        fs::write(&path, document()).expect("writable");
    }
    let kept = fs::read_to_string(&path).expect("docs/options.md; HEAPBPF_BLESS=1 writes it");
    let commands = commands();
    let of_recording = tables(&commands[0].1);
    let mut rows = 0;
    for (name, command) in &commands {
        let is_it = |section: &&str| section.lines().next() == Some(name.as_str());
        let section = kept.split("\n## ").find(is_it).expect("a section");
        for (title, args) in tables(command) {
            if section.contains(&format!("*{title}*")) {
                let shared = of_recording.iter().find(|(known, _)| *known == title).map(|(_, args)| heads(args));
                assert_eq!(shared, Some(heads(&args)), "{name}: {title}; HEAPBPF_BLESS=1 writes it");
                continue;
            }
            for head in heads(&args) {
                assert!(
                    section.lines().any(|line| line.starts_with(&head)),
                    "{name}: no {head}; HEAPBPF_BLESS=1 writes it"
                );
                rows += 1;
            }
        }
    }
    let written = kept.lines().filter(|line| line.starts_with("| `-")).count();
    assert_eq!(written, rows, "docs/options.md has options that do not exist; HEAPBPF_BLESS=1 writes it anew");
}

/// Returns the heapbpf commands in a document, from code spans and from lines of code blocks, up to a comment or a
/// pipe.
fn commands_in(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut is_code = false;
    let mut add = |code: &str| {
        let code = code.trim().trim_start_matches("$ ").trim_start_matches("sudo ");
        let code = code.split(" #").next().unwrap_or_default().split(" | ").next().unwrap_or_default().trim();
        found.extend(code.starts_with("heapbpf ").then(|| code.to_owned()));
    };
    for line in text.lines() {
        match (line.starts_with("```"), is_code) {
            (true, _) => is_code = !is_code,
            (false, true) => add(line),
            (false, false) => line.split('`').skip(1).step_by(2).for_each(&mut add),
        }
    }
    found
}

/// Splits a command into words. Quotes keep words together. Names in capitals are replaced by numbers where a number is
/// needed.
fn words_of(command: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quoted = false;
    for letter in command.chars() {
        match letter {
            '\'' => quoted = !quoted,
            ' ' if !quoted => words.push(String::new()),
            _ => words.last_mut().expect("never empty").push(letter),
        }
    }
    words.into_iter().filter(|word| !word.is_empty()).map(|word| word.replace("PID", "1").replace("$!", "1")).collect()
}

#[test]
fn every_command_in_the_introductions_is_accepted() {
    let (mut number, mut refused) = (0, Vec::new());
    for name in ["README.md", "docs/tutorial.md", "docs/coming-from.md", "docs/fleet.md"] {
        let text = fs::read_to_string(root().join(name)).expect("readable");
        // A bare name, such as `heapbpf diff`, is not a command to run.
        for command in commands_in(&text).into_iter().filter(|command| command.split(' ').count() > 2) {
            // Help is an error that goes to standard output.
            let error = Cli::try_parse_from(words_of(&command)).err().filter(clap::Error::use_stderr);
            let first = error.map(|error| error.to_string().lines().next().unwrap_or_default().to_owned());
            refused.extend(first.map(|first| format!("{name}: {command}: {first}")));
            number += 1;
        }
    }
    assert!(refused.is_empty(), "{}", refused.join("\n"));
    assert!(number > 60, "only {number} commands were found");
}
