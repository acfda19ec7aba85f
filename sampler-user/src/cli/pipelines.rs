//! Destinations of profiles: files, snapshots, scrapers and stores. They are checked before anything is attached.

use std::path::Path;

use heapbpf_record::output::{self, Output, OutputError};
use heapbpf_record::plan::TriggerOptions;
use heapbpf_serve::KeptHistory;
use heapbpf_serve::push::{PushError, PushPlan, SpoolOptions};

use super::error::PlanError;
use super::record_args::{RecordArgs, ServeArgs};

/// Returns the push destinations with their queues.
///
/// # Errors
/// A URL is not a valid destination, or the spool cannot be used.
pub(super) fn push(args: &ServeArgs) -> Result<Option<PushPlan>, PlanError> {
    if args.push.is_empty() {
        return Ok(None);
    }
    let spool = args.spool.as_ref().map(|dir| SpoolOptions { dir: dir.clone(), most_bytes: args.spool_bytes });
    Ok(Some(PushPlan::open(&args.push, args.push_every, spool.as_ref())?))
}

/// Returns the history of earlier runs, if the recording serves and has a spool.
///
/// # Errors
/// The spool cannot be used, or nothing would be kept in it.
pub(super) fn history(args: &ServeArgs) -> Result<Option<KeptHistory>, PlanError> {
    let Some(dir) = &args.spool else { return Ok(None) };
    if args.listen.is_some() {
        return Ok(Some(KeptHistory::open(dir).map_err(PushError::from)?));
    }
    if args.push.is_empty() {
        return Err(PlanError::Usage("--spool needs --push URL, --listen ADDR, or both".into()));
    }
    Ok(None)
}

/// Checks that `heapbpf serve` has an address to listen on or a URL to push to.
///
/// # Errors
/// It has neither.
pub fn check_serves(args: &RecordArgs) -> Result<(), PlanError> {
    if args.serve.listen.is_none() && args.serve.push.is_empty() {
        return Err(PlanError::Usage(
            "serve needs --listen, for example --listen 127.0.0.1:6060, or --push URL".into(),
        ));
    }
    Ok(())
}

/// Returns the output files with their formats.
///
/// # Errors
/// A format is unknown, or the requested snapshots are not possible.
pub(super) fn outputs(args: &RecordArgs) -> Result<Vec<Output>, PlanError> {
    let triggers = args.snapshots.triggers();
    let snapshots = triggers != TriggerOptions::default();
    if snapshots && args.output.outputs.iter().any(|file| file.path.as_os_str() == output::STANDARD_OUTPUT) {
        return Err(PlanError::Usage("--snapshot and --every write files: name one with -o instead of -".into()));
    }
    let serves = args.serve.listen.is_some() || !args.serve.push.is_empty();
    if let Some(format) = args.output.format.as_deref().filter(|_| args.output.outputs.is_empty() && !serves) {
        let why = format!("--format {format} needs a file: -o FILE, or -o - for standard output");
        return Err(PlanError::Usage(why));
    }
    if args.sampling.no_live && (triggers.at_bytes.is_some() || triggers.at_peak) {
        return Err(PlanError::Usage(
            "--snapshot SIZE and --snapshot peak need in-use figures: leave out --no-live".into(),
        ));
    }
    if snapshots && args.output.outputs.is_empty() {
        return Err(PlanError::Usage("--snapshot and --every write files: name one with -o".into()));
    }
    let mut outputs = Vec::new();
    for file in &args.output.outputs {
        if file.path.is_dir() {
            return Err(OutputError::IsDir(file.path.clone()).into());
        }
        outputs.push(Output::new(&file.path, file.format(args.output.format.as_deref())?, args.output.force));
    }
    for output in outputs.iter().filter(|_| snapshots) {
        if let Some(place) = output.special() {
            log::warn!("{} is {place}: it gets no snapshots, only the profile at the end", output.path().display());
        }
    }
    let own = args.output.outputs.iter().map(|file| ("-o", file.path.as_path()));
    each_has_its_own(own.chain(args.output.stats.as_deref().map(|path| ("--stats", path))), args.output.force)?;
    Ok(outputs)
}

/// Checks that no two outputs go to standard output or to the same file, where one would replace the other. Each output
/// comes with the option that names it.
///
/// # Errors
/// Names the first two that do.
pub(super) fn each_has_its_own<'a>(
    outputs: impl Iterator<Item = (&'a str, &'a Path)> + Clone,
    force: bool,
) -> Result<(), PlanError> {
    let is_standard = |path: &Path| path.as_os_str() == output::STANDARD_OUTPUT;
    let standard: Vec<&str> = outputs.clone().filter(|(_, path)| is_standard(path)).map(|(option, _)| option).collect();
    match standard.as_slice() {
        [] | [_] => {}
        [.., "--stats"] => {
            return Err(PlanError::Usage(
                "-o - and --stats -: only one of them can go to standard output; name a file for the other".into(),
            ));
        }
        _ => return Err(PlanError::Usage("-o - twice: only one profile can go to standard output".into())),
    }
    let files = outputs.filter(|(_, path)| !is_standard(path));
    let Some((first, second)) = output::same_file(files.clone().map(|(_, path)| path), force) else { return Ok(()) };
    let option = if files.last().is_some_and(|(option, path)| option == "--stats" && std::ptr::eq(path, second)) {
        "--stats"
    } else {
        "-o"
    };
    Err(PlanError::Usage(format!(
        "-o {} and {option} {} are the same file: give each a name of its own",
        first.display(),
        second.display()
    )))
}
