//! The closing table of a recording, and its accounting.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;

use super::files::Written;
use crate::output::{self, Output};
use crate::record::plan::Display;
use crate::stats::Stats;
use crate::terminal;
use heapbpf_profile::escape::pretty_json;
use heapbpf_profile::formats::WriteOptions;
use heapbpf_profile::model::Profile;
use heapbpf_profile::report::{self, ReportOptions};

/// Files that the closing table mentions.
pub struct Closing<'a> {
    /// All requested outputs.
    pub outputs: &'a [Output],
    /// Files of the last profile.
    pub files: Written,
    /// How many snapshots were written, and where the last one is.
    pub snapshots: Option<(u64, PathBuf)>,
}

/// Prints the closing table to standard output, or to standard error if a profile goes to standard output.
pub fn show_report(profile: &Profile, display: Display, write: &WriteOptions, closing: Closing<'_>) {
    if display.quiet {
        return;
    }
    let Closing { outputs, files, snapshots } = closing;
    let to_error = outputs.iter().any(Output::is_standard_output);
    let terminal = if to_error { std::io::stderr().is_terminal() } else { std::io::stdout().is_terminal() };
    let options = ReportOptions {
        width: terminal::width().unwrap_or(100),
        color: display.color.is_on(terminal),
        group_by: write.group_by,
        sort: write.value,
        confidence: write.confidence,
        files,
        snapshots: snapshots.map(|(count, last)| (count, last.display().to_string())),
        ..ReportOptions::default()
    };
    let text = report::report(profile, &options);
    // A reader that has closed the pipe (`| head`) is not an error.
    let _ = if to_error {
        std::io::stderr().write_all(text.as_bytes())
    } else {
        std::io::stdout().write_all(text.as_bytes())
    };
}

/// Writes the accounting. `force` has the same meaning as for profiles.
///
/// # Errors
/// The accounting cannot be written to `path`.
pub fn write_stats(path: &Path, force: bool, stats: &Stats) -> anyhow::Result<()> {
    let text = pretty_json(stats).context("cannot write the accounting as JSON")?;
    if path.as_os_str() == output::STANDARD_OUTPUT {
        std::io::stdout().write_all(text.as_bytes()).context("cannot write the accounting")?;
        return Ok(());
    }
    output::write_whole(path, force, |out| {
        out.write_all(text.as_bytes()).map_err(|source| output::OutputError::Io { path: path.to_path_buf(), source })
    })?;
    Ok(())
}
