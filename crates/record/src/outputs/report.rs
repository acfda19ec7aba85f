//! The closing table of a recording, and its accounting.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use heapbpf_profile::escape::pretty_json;
use heapbpf_profile::formats::WriteOptions;
use heapbpf_profile::model::Profile;
use heapbpf_profile::report::{self, ReportOptions};

use super::files::Written;
use crate::output::{self, Output};
use crate::plan::Display;
use crate::stats::Stats;
use crate::terminal;

/// Files that the closing table mentions.
pub struct Closing<'a> {
    /// All requested outputs.
    pub outputs: &'a [Output],
    /// Where the accounting was written.
    pub stats: Option<&'a Path>,
    /// Files of the last profile.
    pub files: Written,
    /// How many snapshots were written, and where the last one is.
    pub snapshots: Option<(u64, PathBuf)>,
    /// Whether the recording was a service, whose profiles were available elsewhere all the time.
    pub is_service: bool,
    /// A note of the profile that the user has already been told.
    pub said: Option<String>,
}

impl Closing<'_> {
    /// Whether a profile or the accounting goes to standard output, so that nothing else may be printed there.
    fn takes_standard_output(&self) -> bool {
        let stats = self.stats.is_some_and(|path| path.as_os_str() == output::STANDARD_OUTPUT);
        stats || self.outputs.iter().any(Output::is_standard_output)
    }
}

/// Prints the closing table to standard output, or to standard error if a profile or the accounting uses standard
/// output.
pub fn show_report(profile: &Profile, display: Display, write: &WriteOptions, closing: Closing<'_>) {
    if display.quiet {
        return;
    }
    let to_error = closing.takes_standard_output();
    let Closing { files, snapshots, is_service, said, .. } = closing;
    let terminal = if to_error { std::io::stderr().is_terminal() } else { std::io::stdout().is_terminal() };
    let options = ReportOptions {
        width: terminal::width().unwrap_or(100),
        color: display.color.is_on(terminal),
        group_by: write.group_by,
        sort: write.value,
        frames: display.frames,
        brief: true,
        confidence: write.confidence,
        files,
        said,
        snapshots: snapshots.map(|(count, last)| (count, last.display().to_string())),
        ..ReportOptions::default()
    };
    let mut text = if is_service { report::totals(profile, &options) } else { report::report(profile, &options) };
    if !is_service && options.files.is_empty() && options.snapshots.is_none() {
        text += "\nno file was written · -o x.json keeps everything, -o x.pb.gz is for pprof, -o x.html is a page\n";
    }
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

#[cfg(test)]
mod tests {
    use heapbpf_profile::formats;

    use super::*;

    /// Otherwise the table would end up in the middle of what a program reads.
    #[test]
    fn the_table_leaves_standard_output_to_a_profile_or_the_accounting() {
        for (output, stats, taken) in [
            ("x.json", None, false),
            ("-", None, true),
            ("x.json", Some("-"), true),
            ("x.json", Some("stats.json"), false),
        ] {
            let outputs = [Output::new(output, formats::by_name("json").expect("known"), false)];
            let stats = stats.map(Path::new);
            let (files, snapshots, said) = Default::default();
            let closing = Closing { outputs: &outputs, stats, files, snapshots, is_service: false, said };
            assert_eq!(closing.takes_standard_output(), taken, "{output} {stats:?}");
        }
    }
}
