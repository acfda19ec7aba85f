//! `heapbpf diff` and `heapbpf merge`.

use std::io::{IsTerminal, Write};

use anyhow::Context;
use heapbpf_profile::diff::{self, DiffOptions};
use heapbpf_profile::escape::pretty_json;
use heapbpf_profile::formats::WriteOptions;
use heapbpf_profile::merge;
use heapbpf_record::output::Output;
use heapbpf_record::progress_line::during;
use heapbpf_record::terminal;

use super::error::PlanError;
use super::read_args::{DiffArgs, MergeArgs};
use super::{frames, profiles};
use crate::view::diff::{DiffTableOptions, table};

/// Shows what grew between two profiles.
///
/// # Errors
/// A file cannot be read or is not a profile.
pub fn diff(args: &DiffArgs) -> anyhow::Result<u8> {
    let (before, after) = (profiles::open(&args.before)?, profiles::open(&args.after)?);
    let frames = frames::view(args.frames)?;
    let mut options = DiffOptions { confidence: args.confidence, frames, ..DiffOptions::default() };
    options.exposure = args.per.unwrap_or(options.exposure);
    options.values.extend(args.value);
    if let Some(group_by) = args.group_by {
        options.group_by = group_by;
    }
    let diff = during(|| "comparing".into(), || diff::diff(&before, &after, &options));
    let text = if args.json {
        pretty_json(&diff).context("cannot write the comparison as JSON")?
    } else {
        let color = args.color.is_on(std::io::stdout().is_terminal());
        table(
            &diff,
            &DiffTableOptions { width: terminal::width().unwrap_or(100), color, top: args.top, stacks: args.stacks },
        )
    };
    print(&text)
}

/// Adds profiles.
///
/// # Errors
/// A file cannot be read, the profiles do not fit together, or the sum cannot be written.
pub fn merge(args: &MergeArgs) -> anyhow::Result<u8> {
    let format = args.output.format(args.format.as_deref()).map_err(PlanError::Format)?;
    let output = Output::new(&args.output.path, format, args.force);
    output.check()?;
    let inputs = args.profiles.iter().map(|path| profiles::open(path)).collect::<Result<Vec<_>, _>>()?;
    let merged = during(|| format!("adding {} profiles", args.profiles.len()), || merge::merge(inputs))?;
    during(|| format!("writing {}", args.output.path.display()), || output.write(&merged, &WriteOptions::default()))?;
    Ok(0)
}

/// Writes to standard output. A reader that closes the pipe (`| head`) is not an error.
pub fn print(text: &str) -> anyhow::Result<u8> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(0),
        other => other.map(|()| 0).context("cannot write to standard output"),
    }
}
