//! `heapbpf report`: a saved profile as text tables.

use std::io::IsTerminal;

use super::args::ReportArgs;
use super::compare::print;
use crate::profile::adjust::Adjustments;
use crate::profile::read;
use crate::record::terminal_width;
use crate::view::report::{self, ReportOptions};

/// Shows a profile. Returns the exit status.
///
/// # Errors
/// The file cannot be read, or is no profile.
pub fn run(args: &ReportArgs) -> anyhow::Result<u8> {
    let mut profile = read::open(&args.profile)?;
    let adjustments = Adjustments { calibrate: args.calibrate, at: args.at.into(), estimator: args.estimator };
    adjustments.apply(&mut profile)?;
    let options = ReportOptions {
        width: terminal_width().unwrap_or(100),
        color: args.color.is_on(std::io::stdout().is_terminal()),
        group_by: args.group_by,
        sort: args.value,
        top: args.top,
        fold_recursion: args.fold_recursion,
        confidence: args.confidence,
        ..ReportOptions::default()
    };
    print(&report::report(&profile, &options))
}
