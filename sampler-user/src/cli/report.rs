//! `heapbpf report`: a saved profile as text tables.

use std::io::{IsTerminal, Write};

use anyhow::Context;

use super::args::{Color, ReportArgs};
use crate::profile::read;
use crate::record::terminal_width;
use crate::view::report::{self, ReportOptions};

/// Shows a profile. Returns the exit status.
///
/// # Errors
/// The file cannot be read, or is no profile.
pub fn run(args: &ReportArgs) -> anyhow::Result<u8> {
    let profile = read::open(&args.profile)?;
    let options = ReportOptions {
        width: terminal_width().unwrap_or(100),
        color: match args.color {
            Color::Auto => std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none(),
            Color::Always => true,
            Color::Never => false,
        },
        sort: args.value,
        top: args.top,
        fold_recursion: args.fold_recursion,
        confidence: args.confidence,
        ..ReportOptions::default()
    };
    match std::io::stdout().write_all(report::report(&profile, &options).as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(0),
        other => other.map(|()| 0).context("cannot write the report"),
    }
}
