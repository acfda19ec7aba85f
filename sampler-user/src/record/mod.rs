//! A recording from its plan to its files.

mod accounting;
mod attaching;
mod command;
mod governor;
mod naming;
mod notify;
mod profile;
mod recorder;
mod session;
mod signals;
mod targets;

use std::io::{IsTerminal, Write};
use std::path::Path;

use anyhow::Context;

use crate::cli::plan::RecordPlan;
use crate::profile::formats::{Format, WriteOptions};
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
    local.block_on(&runtime, session::run(plan))
}

/// The outputs of a recording: as named, or one with a default name.
fn resolve_outputs(plan: &RecordPlan, first: Option<(&str, u32)>) -> Vec<Output> {
    if !plan.outputs.is_empty() {
        return plan.outputs.clone();
    }
    let path = output::default_path(std::path::Path::new("."), first, plan.default_format);
    vec![Output::new(path, plan.default_format, false)]
}

/// Writes a profile to all outputs. Returns the files with the command that opens each.
fn write_outputs(
    outputs: &[Output],
    profile: &Profile,
    options: &WriteOptions,
) -> anyhow::Result<Vec<(String, String)>> {
    let mut written = Vec::new();
    for output in outputs {
        for path in output.write(profile, options)? {
            let opener = opener(output.format(), &path);
            written.push((path.display().to_string(), opener));
        }
    }
    Ok(written)
}

/// Writes a snapshot: the outputs' names with a number.
fn write_snapshot(outputs: &[Output], number: u32, profile: &Profile, options: &WriteOptions) -> anyhow::Result<()> {
    for output in outputs {
        let path = output::with_suffix(output.path(), output.format(), &format!("{number:04}"));
        Output::new(path, output.format(), true).write(profile, options)?;
    }
    Ok(())
}

/// How a user opens a file.
fn opener(format: &dyn Format, path: &std::path::Path) -> String {
    let path = path.display();
    match format.name() {
        "pprof" => format!("go tool pprof -http=: {path}"),
        "folded" => format!("inferno-flamegraph {path} > flames.svg"),
        "svg" | "html" => format!("xdg-open {path}"),
        "speedscope" => format!("npx speedscope {path}"),
        "heap" => format!("jeprof --text {path}"),
        "perfetto" => format!("ui.perfetto.dev (load {path})"),
        "parquet" => format!("duckdb -c \"from '{path}'\""),
        _ => format!("heapbpf report {path}"),
    }
}

/// Shows the closing table: on standard output, or on standard error if a profile goes there.
fn show_report(profile: &Profile, plan: &RecordPlan, outputs: &[Output], files: Vec<(String, String)>) {
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

/// Writes the accounting.
fn write_stats(path: &Path, stats: &crate::profile::stats::Stats) -> anyhow::Result<()> {
    let text = serde_json::to_vec_pretty(stats).context("cannot write the accounting as JSON")?;
    if path.as_os_str() == "-" {
        std::io::stdout().write_all(&text).context("cannot write the accounting")?;
        return Ok(());
    }
    output::write_whole(path, true, |out| {
        out.write_all(&text).map_err(|source| output::OutputError::Io { path: path.to_path_buf(), source })
    })?;
    Ok(())
}
