//! `heapbpf report`: shows a saved profile as text tables, or writes it in another format. It can add names to a
//! profile without names.

use std::io::IsTerminal;
use std::sync::Arc;

use heapbpf_profile::adjust::Adjustments;
use heapbpf_profile::escape::escaped;
use heapbpf_profile::filter::Filter;
use heapbpf_profile::formats::WriteOptions;
use heapbpf_profile::model::Profile;
use heapbpf_profile::report::{self, ReportOptions, Tree};
use heapbpf_record::progress_line::during;
use heapbpf_record::remarks::say;
use heapbpf_record::terminal;
use heapbpf_symbols::debuginfod::settings;
use heapbpf_symbols::offline::{self, Summary};
use heapbpf_symbols::options::Options;
use heapbpf_symbols::progress::Progress;

use super::compare::print;
use super::error::PlanError;
use super::profiles;
use super::read_args::ReportArgs;
use super::report_products::products;
use super::{frames, plan};

/// Default number of table rows.
const ROWS: usize = 20;
/// Maximum number of reasons for missing names that are printed.
const MOST_REASONS: usize = 5;

/// Shows or writes a profile. Returns the exit status.
///
/// # Errors
/// The file cannot be read or is not a profile, or an output cannot be written.
pub fn run(args: &ReportArgs) -> anyhow::Result<u8> {
    let options = options(args)?;
    let products = products(args, &options)?;
    plan::check_debug_dirs(&args.debug_dir)?;
    let mut all = Vec::with_capacity(args.profiles.len());
    for path in &args.profiles {
        let mut profile = profiles::open(path)?;
        if args.symbolize {
            tell(&symbolize(&mut profile, args));
        }
        let adjustments = Adjustments { calibrate: args.calibrate, at: args.at.into(), estimator: args.estimator };
        adjustments.apply(&mut profile)?;
        filter(args).apply(&mut profile);
        all.push(profile);
    }
    let Some(profile) = all.first() else { return Ok(0) };
    let write = WriteOptions { value: args.value, confidence: args.confidence, group_by: args.group_by };
    for product in &products {
        during(
            || format!("writing {}", product.path().display()),
            || product.write(&all, profile, args, &options, &write),
        )?;
    }
    if !products.is_empty() {
        return Ok(0);
    }
    print(&during(|| "adding up".into(), || report::report(profile, &options)))
}

/// Whether the user asked only for the short answer.
fn is_brief(args: &ReportArgs) -> bool {
    let asks = args.details || args.by.is_some() || args.suspects || args.tree || args.callers.is_some();
    !asks && args.top.is_none() && args.functions == 0 && !args.guaranteed && !args.no_fold_recursion
}

fn options(args: &ReportArgs) -> Result<ReportOptions, PlanError> {
    Ok(ReportOptions {
        width: terminal::width().unwrap_or(100),
        color: args.color.is_on(std::io::stdout().is_terminal()),
        group_by: args.group_by,
        sort: args.value,
        brief: is_brief(args),
        by: args.by.unwrap_or_default(),
        tree: args.callers.clone().map(Tree::Callers).or(args.tree.then_some(Tree::Down)),
        suspects: args.suspects,
        top: args.top.unwrap_or(ROWS),
        functions: args.functions,
        fold_recursion: !args.no_fold_recursion,
        frames: frames::view(args.frames)?,
        confidence: args.confidence,
        guaranteed: args.guaranteed,
        source: args.profiles.first().map(|path| path.display().to_string()),
        ..ReportOptions::default()
    })
}

fn filter(args: &ReportArgs) -> Filter {
    Filter { focus: args.focus.clone(), ignore: args.ignore.clone(), hide: args.hide.clone(), show: args.show.clone() }
}

/// Adds names. Shows the progress if standard error is a terminal.
fn symbolize(profile: &mut Profile, args: &ReportArgs) -> Summary {
    let settings = settings::read(&args.debuginfod, |name| std::env::var_os(name));
    let options = Options::new(&args.debug_dir, args.max_debug_bytes).with_debuginfod(settings).demangling_apart();
    let progress = Arc::<Progress>::default();
    let told = Arc::clone(&progress);
    let line = move || {
        let (named, of) = told.get();
        told.get_download()
            .map_or_else(|| format!("finding names: {named} of {of} places"), |download| download.to_string())
    };
    during(line, || offline::symbolize(profile, options, progress))
}

/// Prints to standard error how many names were found, and why others were not.
fn tell(summary: &Summary) {
    say(format!("found names for {} of {} addresses without one", summary.named, summary.asked));
    let mut reasons: Vec<_> = summary.unnamed.iter().collect();
    reasons.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    for (reason, count) in reasons.iter().take(MOST_REASONS) {
        say(format!("{count} without a name: {}", escaped(reason)));
    }
    if let Some(more @ 1..) = reasons.len().checked_sub(MOST_REASONS) {
        say(format!("and {more} more reasons (the profile has them all)"));
    }
    for note in &summary.notes {
        say(escaped(note));
    }
}
