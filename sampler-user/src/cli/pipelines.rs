//! Where profiles go: files, snapshots, scrapers and stores. Judged before anything is attached.

use super::args::{RecordArgs, ServeArgs, SnapshotArgs};
use super::plan::PlanError;
use crate::profile::formats;
use crate::profile::output::{self, Output, OutputError};
use crate::serve::push::{PushPlan, SpoolOptions};

/// The destinations, with their queues.
///
/// # Errors
/// A URL that cannot be pushed to, or a spool that cannot be used.
pub(super) fn push(args: &ServeArgs) -> Result<Option<PushPlan>, PlanError> {
    if args.push.is_empty() {
        return Ok(None);
    }
    let spool = args.spool.as_ref().map(|folder| SpoolOptions { folder: folder.clone(), most_bytes: args.spool_bytes });
    Ok(Some(PushPlan::open(&args.push, args.push_every, spool.as_ref())?))
}

/// Whether `heapbpf serve` was told where.
///
/// # Errors
/// It was not.
pub fn check_serves(args: &RecordArgs) -> Result<(), PlanError> {
    if args.serve.listen.is_none() && args.serve.push.is_empty() {
        return Err(PlanError::Usage(
            "serve needs an address: --listen 127.0.0.1:6060, for example (or --push URL)".into(),
        ));
    }
    Ok(())
}

/// The files that are named, with their formats.
///
/// # Errors
/// An unknown format, or snapshots that cannot be.
pub(super) fn outputs(args: &RecordArgs) -> Result<Vec<Output>, PlanError> {
    let SnapshotArgs { every, at_bytes, at_peak, at_limit, .. } = args.snapshots;
    let snapshots = every.is_some() || at_bytes.is_some() || at_peak || at_limit;
    if snapshots && args.outputs.iter().any(|path| path.as_os_str() == output::STANDARD_OUTPUT) {
        return Err(PlanError::Usage(
            "--every, --at-bytes, --at-peak and --at-limit write files: name one with -o instead of -".into(),
        ));
    }
    if args.no_live && (at_bytes.is_some() || at_peak) {
        return Err(PlanError::Usage(
            "--at-bytes and --at-peak are about what is in use, which --no-live leaves out".into(),
        ));
    }
    let mut outputs = Vec::new();
    for path in &args.outputs {
        if path.is_dir() {
            return Err(OutputError::IsFolder(path.clone()).into());
        }
        let format = formats::choose(path, args.format.as_deref())?;
        outputs.push(Output::new(path, format, args.force));
    }
    for output in outputs.iter().filter(|_| snapshots) {
        if let Some(place) = output.special() {
            log::warn!("{} is {place}: it gets no snapshots, only the profile at the end", output.path().display());
        }
    }
    if outputs.iter().filter(|output| output.is_standard_output()).count() > 1 {
        return Err(PlanError::Usage("-o -: standard output takes one profile".into()));
    }
    Ok(outputs)
}
