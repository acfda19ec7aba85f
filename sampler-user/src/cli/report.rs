//! `heapbpf report`: shows a saved profile as text tables, or writes it in another format. It can add names to a
//! profile that has none.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use anyhow::bail;

use super::compare::print;
use super::error::PlanError;
use super::plan;
use super::read_args::ReportArgs;
use crate::output::Output;
use crate::symbols::debuginfod::settings;
use crate::symbols::offline::{self, Summary};
use crate::symbols::progress::Progress;
use crate::symbols::symbolizer::Options;
use crate::terminal;
use heapbpf_profile::adjust::Adjustments;
use heapbpf_profile::escape::escaped;
use heapbpf_profile::filter::Filter;
use heapbpf_profile::formats::{self, WriteOptions};
use heapbpf_profile::model::Profile;
use heapbpf_profile::read;
use heapbpf_profile::report::text::clip;
use heapbpf_profile::report::{self, ReportOptions, Tree};

/// How often progress is shown.
const TELL_EVERY: Duration = Duration::from_millis(200);
/// Maximum number of reasons for missing names that are printed.
const MOST_REASONS: usize = 5;

/// Shows or writes a profile. Returns the exit status.
///
/// # Errors
/// The file cannot be read or is not a profile, or an output cannot be written.
pub fn run(args: &ReportArgs) -> anyhow::Result<u8> {
    let outputs = outputs(args)?;
    plan::check_debug_dirs(&args.debug_dir)?;
    let mut profile = read::open(&args.profile)?;
    if args.symbolize {
        tell(&symbolize(&mut profile, args));
    }
    let adjustments = Adjustments { calibrate: args.calibrate, at: args.at.into(), estimator: args.estimator };
    adjustments.apply(&mut profile)?;
    filter(args).apply(&mut profile);
    let write = WriteOptions { value: args.value, confidence: args.confidence, group_by: args.group_by };
    for output in &outputs {
        output.write(&profile, &write)?;
    }
    if !outputs.is_empty() {
        return Ok(0);
    }
    let options = ReportOptions {
        width: terminal::width().unwrap_or(100),
        color: args.color.is_on(std::io::stdout().is_terminal()),
        group_by: args.group_by,
        sort: args.value,
        by: args.by,
        tree: args.callers.clone().map(Tree::Callers).or(args.tree.then_some(Tree::Down)),
        suspects: args.suspects,
        top: args.top,
        functions: args.functions,
        fold_recursion: args.fold_recursion,
        confidence: args.confidence,
        guaranteed: args.guaranteed,
        ..ReportOptions::default()
    };
    print(&report::report(&profile, &options))
}

/// The name of the format that is tables on a terminal, not a file.
const TEXT: &str = "text";

/// The outputs, checked; none if tables are to be shown.
fn outputs(args: &ReportArgs) -> anyhow::Result<Vec<Output>> {
    let format = args.format.as_deref();
    let standard_output = [PathBuf::from("-")];
    let paths = match (args.outputs.as_slice(), format) {
        ([], None | Some(TEXT)) => return Ok(Vec::new()),
        ([], Some(_)) => &standard_output,
        (paths, Some(TEXT)) => bail!(
            "--format text shows tables on standard output and writes no file: leave out -o {}",
            escaped(&paths[0].to_string_lossy())
        ),
        (paths, _) => paths,
    };
    let mut outputs = Vec::new();
    for path in paths {
        let format = formats::choose(path, format).map_err(PlanError::Format)?;
        let output = Output::new(path, format, args.force);
        output.check()?;
        outputs.push(output);
    }
    Ok(outputs)
}

fn filter(args: &ReportArgs) -> Filter {
    Filter { focus: args.focus.clone(), ignore: args.ignore.clone(), hide: args.hide.clone(), show: args.show.clone() }
}

/// Adds names; shows the progress if standard error is a terminal.
fn symbolize(profile: &mut Profile, args: &ReportArgs) -> Summary {
    let settings = settings::read(&args.debuginfod, |name| std::env::var_os(name));
    let options = Options::new(&args.debug_dir, args.max_debug_bytes).with_debuginfod(settings);
    let progress = Arc::<Progress>::default();
    if !std::io::stderr().is_terminal() {
        return offline::symbolize(profile, options, progress);
    }
    let (done, ended) = mpsc::channel::<()>();
    let told = Arc::clone(&progress);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while ended.recv_timeout(TELL_EVERY) == Err(mpsc::RecvTimeoutError::Timeout) {
                let (named, of) = told.get();
                let names = || format!("finding names: {named} of {of} places");
                let line = told.get_download().map_or_else(names, |download| download.to_string());
                eprint!("\r\x1b[K{}", clip(&line, terminal::width().unwrap_or(80).saturating_sub(1)));
            }
            eprint!("\r\x1b[K");
        });
        let summary = offline::symbolize(profile, options, progress);
        drop(done);
        summary
    })
}

/// Prints to standard error how many names were found, and why others were not.
fn tell(summary: &Summary) {
    eprintln!("heapbpf: {} of {} addresses without names have one now", summary.named, summary.asked);
    let mut reasons: Vec<_> = summary.unnamed.iter().collect();
    reasons.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    for (reason, count) in reasons.iter().take(MOST_REASONS) {
        eprintln!("heapbpf: {count} not: {}", escaped(reason));
    }
    if let Some(more @ 1..) = reasons.len().checked_sub(MOST_REASONS) {
        eprintln!("heapbpf: and {more} more reasons, which are in the profile");
    }
    for note in &summary.notes {
        eprintln!("heapbpf: {}", escaped(note));
    }
}
