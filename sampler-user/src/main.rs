//! The `heapbpf` command: parses the command line, runs the command, and reports errors.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use heapbpf_profile::escape::escaped_lines;
use sampler_user::cli::args::{Cli, Command, TopArgs};
use sampler_user::cli::error::exit_status;
use sampler_user::cli::plan;
use sampler_user::cli::record_args::RecordArgs;
use sampler_user::host::own_memory::return_what_is_free;
use sampler_user::privileges::hide_memory;
use sampler_user::{cli, cost, run};

fn main() -> ExitCode {
    return_what_is_free();
    let cli = Cli::try_parse().unwrap_or_else(|error| cli::hints::explained(error).exit());
    let outcome = match &cli.command {
        None => start(&cli.record),
        Some(Command::Record(args)) => start(args),
        Some(Command::Serve(args)) => serve(args),
        Some(Command::Top(args)) => top(args),
        Some(Command::Report(args)) => cli::report::run(args),
        Some(Command::Diff(args)) => cli::compare::diff(args),
        Some(Command::Merge(args)) => cli::compare::merge(args),
        Some(Command::Plan(args)) => cli::preview::run(args),
        Some(Command::Doctor(args)) => cli::doctor::run(args),
        Some(Command::Pairs) => cost::workload::serve().map(|()| 0).map_err(Into::into),
    };
    outcome.map_or_else(
        |error| {
            let _ = writeln!(std::io::stderr(), "heapbpf: {}", escaped_lines(&told(&error)));
            ExitCode::from(exit_status(&error))
        },
        ExitCode::from,
    )
}

/// The error and its causes. A cause that a message already contains is not repeated.
fn told(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for message in error.chain().map(ToString::to_string).filter(|message| !message.is_empty()) {
        if !text.contains(&message) {
            let colon = if text.is_empty() { "" } else { ": " };
            text.push_str(colon);
            text.push_str(&message);
        }
    }
    text
}

fn start(args: &RecordArgs) -> anyhow::Result<u8> {
    cli::log::start(args.display.verbose);
    hide_memory();
    run::run(plan::plan(args)?)
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
