//! `heapbpf top`: shows processes, or a running service, live in the terminal.

use std::io::IsTerminal;

use clap::Parser as _;
use heapbpf_access::tokens::Tokens;
use heapbpf_record::terminal::Color;

use super::args::{Cli, TopArgs};
use super::error::PlanError;
use super::record_args::RecordArgs;
use super::{frames, plan};
use crate::top::{Address, Look, live, watched};

/// Shows the screen until the user quits. Returns the exit status.
///
/// # Errors
/// A sentence that says what to do. Nothing stays attached.
pub fn run(args: &TopArgs) -> anyhow::Result<u8> {
    check_terminal()?;
    let frames = frames::view(args.frames)?;
    let look = Look { confidence: args.confidence, color: args.color.is_on(true), refresh: args.refresh, frames };
    let Some(url) = &args.url else {
        let recording = plan::recording(&recording_args(args), true)?;
        return live(recording, look);
    };
    if args.target.is_some() {
        return Err(PlanError::Usage(
            "name either an address or processes of this host (--pid and the like), not both".into(),
        )
        .into());
    }
    let token = args.token_file.as_deref().map(Tokens::read).transpose()?;
    let token = token.as_ref().and_then(Tokens::first);
    let address = Address::parse(url, token).map_err(PlanError::Usage)?;
    watched(address, look)
}

/// Checks that there is a terminal to draw on.
fn check_terminal() -> Result<(), PlanError> {
    let is_terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    if is_terminal && !is_dumb {
        return Ok(());
    }
    let why = if is_terminal { "TERM is dumb" } else { "standard input or output is not one" };
    Err(PlanError::Usage(format!(
        "top needs a terminal, but {why}: for files or a pipe, record with --every 10s -o heap.json and read the snapshots \
         with heapbpf report"
    )))
}

/// Returns the options of a recording that writes nothing and shows nothing itself.
fn recording_args(args: &TopArgs) -> RecordArgs {
    let mut options = Cli::parse_from(["heapbpf"]).record;
    (options.target, options.sampling) = (args.target.clone(), args.sampling.clone());
    (options.stacks, options.limits) = (args.stacks.clone(), args.limits.clone());
    options.output.confidence = args.confidence;
    let display = &mut options.display;
    (display.quiet, display.no_progress, display.verbose) = (true, true, args.verbose);
    (display.color, display.frames) = (Color::Never, args.frames);
    options
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::Command;

    fn parsed(words: &[&str]) -> TopArgs {
        let cli = Cli::try_parse_from([&["heapbpf", "top"], words].concat()).unwrap();
        let Some(Command::Top(args)) = cli.command else { panic!("another command") };
        *args
    }

    #[test]
    fn targets_and_sampling_are_those_of_a_recording() {
        let args = parsed(&["--pid", "7", "-i", "64k", "--no-live"]);
        assert!(args.target.is_some() && args.url.is_none());
        let recording = recording_args(&args);
        assert_eq!((recording.target.pids, recording.sampling.no_live), (vec![7], true));
        assert!(recording.display.quiet && recording.output.outputs.is_empty());
    }

    #[test]
    fn an_address_is_no_target() {
        let args = parsed(&["http://127.0.0.1:6060", "--token-file", "t"]);
        assert!(!args.target.is_some() && args.url.is_some());
        assert!(parsed(&["--", "true"]).target.is_some());
    }

    #[test]
    fn without_a_terminal_it_says_what_to_do() {
        // Tests have no terminal as input, unless somebody runs them in one.
        if let Err(error) = check_terminal() {
            assert!(error.to_string().contains("--every"), "{error}");
            assert_eq!(error.exit_status(), 2);
        }
    }
}
