//! A recording from its plan to its files.

mod accounting;
mod attaching;
mod command;
#[cfg(test)]
mod cut_tests;
mod describe;
mod ended;
mod files;
mod free_groups;
mod governor;
mod losses;
pub mod maker;
mod memory_limits;
pub mod naming;
mod notify;
mod own_code;
mod queue;
mod recorder;
pub mod requests;
mod residue;
mod run;
mod session;
mod signals;
pub mod snapshot;
mod status_line;
mod targets;
mod triggers;
mod window_progress;
mod window_times;

use files::Written;
pub use residue::Code;
pub use triggers::TriggerOptions;

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::cli::plan::RecordPlan;
use crate::profile::model::Profile;
use crate::profile::output::{self, Output};
use crate::view::report::{self, ReportOptions};

/// Records, writes the files and shows the table. Returns heapbpf's exit status.
///
/// # Errors
/// One sentence with what to do. Nothing stays attached, no half-written file stays behind.
pub fn run(plan: RecordPlan) -> anyhow::Result<u8> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start")?;
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, run::run(plan))
}

/// Shows the closing table: on standard output, or on standard error if a profile goes there.
fn show_report(
    profile: &Profile,
    plan: &RecordPlan,
    outputs: &[Output],
    files: Written,
    snapshots: Option<(u64, PathBuf)>,
) {
    if plan.quiet {
        return;
    }
    let to_error = outputs.iter().any(Output::is_standard_output);
    let terminal = if to_error { std::io::stderr().is_terminal() } else { std::io::stdout().is_terminal() };
    let options = ReportOptions {
        width: terminal_width().unwrap_or(100),
        color: plan.color.is_on(terminal),
        group_by: plan.write.group_by,
        sort: plan.write.value,
        confidence: plan.write.confidence,
        files,
        snapshots: snapshots.map(|(count, last)| (count, last.display().to_string())),
        ..ReportOptions::default()
    };
    let text = report::report(profile, &options);
    // A reader that went away (`| head`) is no error.
    let _ = if to_error {
        std::io::stderr().write_all(text.as_bytes())
    } else {
        std::io::stdout().write_all(text.as_bytes())
    };
}

/// Columns of the terminal, if there is one.
pub fn terminal_width() -> Option<usize> {
    // SAFETY: plain integers, all zeros is a value.
    let mut size: libc::winsize = unsafe { std::mem::zeroed() };
    [libc::STDOUT_FILENO, libc::STDERR_FILENO].into_iter().find_map(|fd| {
        // SAFETY: room for the result.
        let status = unsafe { libc::ioctl(fd, libc::TIOCGWINSZ, &raw mut size) };
        (status == 0 && size.ws_col > 0).then_some(usize::from(size.ws_col))
    })
}

/// Writes the accounting; `force` as for profiles.
fn write_stats(path: &Path, force: bool, stats: &crate::profile::stats::Stats) -> anyhow::Result<()> {
    let text = serde_json::to_vec_pretty(stats).context("cannot write the accounting as JSON")?;
    if path.as_os_str() == output::STANDARD_OUTPUT {
        std::io::stdout().write_all(&text).context("cannot write the accounting")?;
        return Ok(());
    }
    output::write_whole(path, force, |out| {
        out.write_all(&text).map_err(|source| output::OutputError::Io { path: path.to_path_buf(), source })
    })?;
    Ok(())
}
