//! The `heapbpf` command: parses the command line, runs the command, and reports errors.

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{FromArgMatches, Parser};
use heapbpf_host::limits;
use heapbpf_host::name_services::use_built_in;
use heapbpf_host::own_memory::return_what_is_free;
use heapbpf_host::privileges::hide_memory;
use heapbpf_kernel::{KernelError, guardian, object};
use heapbpf_profile::escape::{escaped, escaped_lines};
use heapbpf_record::cost;
use heapbpf_record::crash::report_crashes;
use heapbpf_record::remarks::say;
use heapbpf_symbols::demangle::process as demangling;

use crate::cli::args::{Cli, Command, DemoArgs, TopArgs};
use crate::cli::error::exit_status;
use crate::cli::plan;
use crate::cli::record_args::RecordArgs;
use crate::doctor::clean;
use crate::{cli, demo, run as recording};

/// Runs the command. `programs` are the BPF programs it contains: an ELF object, aligned to 8 bytes, or nothing.
pub fn run(programs: &'static [u8]) -> ExitCode {
    object::embed(programs);
    if let Some(length) = demo::asked_for(std::env::args_os()) {
        return demo::run(length).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
    }
    // Not a user command. Completions and man pages list all commands, so it must not be one.
    if std::env::args_os().skip(1).eq([cost::workload::WORD]) {
        return cost::workload::serve().map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
    }
    if let Some(task) = guardian::process::asked_for(std::env::args_os()) {
        return guardian::process::run(task).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
    }
    if let Some(daemon) = clean::asked_for(std::env::args_os()) {
        return clean::run(daemon).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
    }
    if let Some(task) = demangling::asked_for(std::env::args_os()) {
        return demangling::run(task).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
    }
    report_crashes();
    use_built_in();
    return_what_is_free();
    let wants_all = cli::manual::wants_all(std::env::args_os());
    let words = cli::hints::guessed(std::env::args_os());
    let matches = cli::manual::command(wants_all).try_get_matches_from(words);
    let cli = matches.and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = cli.unwrap_or_else(|error| cli::hints::explained(error).exit());
    let outcome = match &cli.command {
        None if is_lost() => first_steps(),
        None => start(&cli.record),
        Some(Command::Record(args)) => start(args),
        Some(Command::Serve(args)) => serve(args),
        Some(Command::Top(args)) => top(args),
        Some(Command::Report(args)) => cli::report::run(args),
        Some(Command::Diff(args)) => cli::compare::diff(args),
        Some(Command::Merge(args)) => cli::compare::merge(args),
        Some(Command::Plan(args)) => cli::plan_command::run(args),
        Some(Command::Census(args)) => cli::census::run(args),
        Some(Command::Doctor(args)) => cli::doctor::run(args),
        Some(Command::Demo(args)) => demo(args),
        Some(Command::Completions(args)) => cli::manual::completions(args),
        Some(Command::Man(args)) => cli::manual::pages(args),
    };
    outcome.map_or_else(
        |error| {
            let text = error_text(&error);
            // Only the verifier's log has several lines. Names of files and processes are escaped, so they cannot add
            // lines.
            let text = if has_kernel_log(&error) { escaped_lines(&text) } else { escaped(&text).into_owned() };
            say(text);
            ExitCode::from(exit_status(&error))
        },
        ExitCode::from,
    )
}

/// Whether the error contains a kernel log, which has several lines.
fn has_kernel_log(error: &anyhow::Error) -> bool {
    let of_kernel = |cause: &(dyn std::error::Error + 'static)| {
        matches!(cause.downcast_ref(), Some(KernelError::Program { .. } | KernelError::BtfRefused { .. }))
    };
    error.chain().any(of_kernel)
}

/// Returns the error and its causes. A cause that a message already contains is not repeated.
fn error_text(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for message in error.chain().map(ToString::to_string).filter(|message| !message.is_empty()) {
        if !text.contains(&message) {
            let colon = if text.is_empty() { "" } else { ": " };
            text.push_str(colon);
            text.push_str(&message);
        }
    }
    match limits::advice(&text) {
        Some(advice) => format!("{text}; {advice}"),
        None => text,
    }
}

fn start(args: &RecordArgs) -> anyhow::Result<u8> {
    cli::log::start(args.display.verbose);
    hide_memory();
    recording::run(plan::plan(args)?)
}

/// Whether somebody at a terminal has typed only the name of the program.
fn is_lost() -> bool {
    std::env::args_os().len() <= 1 && std::io::stderr().is_terminal()
}

/// Shows the first steps. The exit status says that nothing was recorded.
fn first_steps() -> anyhow::Result<u8> {
    let _ = std::io::stderr().write_all(cli::manual::FIRST_STEPS.as_bytes());
    Ok(2)
}

/// Records heapbpf itself, run as a program with a leak.
fn demo(args: &DemoArgs) -> anyhow::Result<u8> {
    let program = std::env::current_exe().context("cannot find heapbpf's own executable")?;
    let options = ["heapbpf", "--interval", "16KiB", "--"].map(OsString::from);
    let command = [program.into_os_string(), demo::WORD.into(), args.duration.as_millis().to_string().into()];
    let words = options.into_iter().chain(command);
    start(&Cli::try_parse_from(words)?.record)
}

fn serve(args: &RecordArgs) -> anyhow::Result<u8> {
    cli::pipelines::check_serves(args)?;
    start(args)
}

fn top(args: &TopArgs) -> anyhow::Result<u8> {
    cli::log::start(args.verbose);
    hide_memory();
    cli::top::run(args)
}
