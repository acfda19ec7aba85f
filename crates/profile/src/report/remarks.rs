//! Remarks below the figures: losses, incomplete stacks, coverage, notes.

use std::collections::BTreeMap;

use super::processes::{Entry, entries};
use super::{Context, hooking, plural};
use crate::estimates::{NO_SAMPLES, TIME_WINDOWS};
use crate::group::{GroupBy, process_name};
use crate::loss_bounds::{PEAK_UNKNOWN, UNBOUNDED, UNSEEN, WEIGHTS_UNPROVEN};
use crate::model::{LOST_PREFIX, LossBound, Losses, Process, Profile};
use crate::report::text::{Style, wrap};
use crate::units;
use crate::value::Value;

/// The counter of calls in flight at the end of the recording, which are not lost.
const IN_FLIGHT: &str = "in_flight";

/// Maximum number of remarks of one kind, because a host has thousands of processes.
const MOST: usize = 5;

/// Text that identifies notes about what is in no figure. They come first.
const IN_NO_FIGURE: [&str; 4] = ["not counted: ", "is missing", "is not included", "are not included"];

/// Maximum number of processes that get an individual remark about how long they were hooked.
const SEPARATE: usize = 2;

/// Lines of the section; empty if there are no remarks.
pub(super) fn section(context: &Context) -> Vec<String> {
    let mark = context.paint(Style::Warning, "!");
    let line =
        |(index, line): (usize, String)| if index == 0 { format!("  {mark} {line}") } else { format!("    {line}") };
    all(context).iter().flat_map(|remark| wrap(remark, context.width - 4).into_iter().enumerate().map(line)).collect()
}

/// All remarks, each in one line.
pub(super) fn all(context: &Context) -> Vec<String> {
    let mut remarks = Vec::new();
    remarks.extend(without_wanted(context));
    remarks.extend(of_losses(context));
    if context.profile.header.samples_known {
        remarks.extend(lost_in_use(context));
        remarks.extend(unbounded(context));
    }
    remarks.extend(since(context.profile));
    remarks.extend(incomplete(context));
    remarks.extend(limited(distant(context)));
    remarks.extend(limited(coverage(context)));
    if !context.profile.header.samples_known {
        remarks.push(format!("no error bars: {NO_SAMPLES}"));
    } else if context.profile.header.time_windows {
        remarks.push(format!("no error bars for allocations: {TIME_WINDOWS}"));
    }
    let unnamed = crate::unnamed::modules(context.profile);
    remarks.extend(limited(unnamed.iter().filter_map(|module| module.reason.as_deref().map(str::to_owned)).collect()));
    let mut notes = context.profile.notes.clone();
    notes.sort_by_key(|note| !IN_NO_FIGURE.iter().any(|text| note.contains(text)));
    remarks.extend(limited(notes));
    remarks
}

/// All remarks, and why processes were not hooked inline. The complete report has a section for the latter.
pub(super) fn with_refusals(context: &Context) -> Vec<String> {
    let mut remarks = all(context);
    let first = usize::from(without_wanted(context).is_some()) + of_losses(context).count();
    drop(remarks.splice(first..first, hooking::refusals(context.profile).0));
    remarks
}

/// Remarks about what was not read or was lost.
pub(super) fn of_losses(context: &Context) -> impl Iterator<Item = String> {
    unread(context.profile).into_iter().chain(losses(context))
}

fn limited(mut remarks: Vec<String>) -> Vec<String> {
    let more = remarks.len().saturating_sub(MOST);
    remarks.truncate(MOST);
    if more > 0 {
        remarks.push(format!("and {} of this kind", plural(more as u64, "more remark")));
    }
    remarks
}

/// Remark if the profile lacks the requested sort value.
fn without_wanted(context: &Context) -> Option<String> {
    let wanted = context.options.sort.filter(|wanted| !super::has(context.profile, *wanted))?;
    let instead = context.sort.title();
    Some(format!(
        "no {} in this profile: frees were not tracked (--no-live); sorted by {instead} instead",
        wanted.name()
    ))
}

/// Remark about records that were sent before the time of the figures but not read.
fn unread(profile: &Profile) -> Option<String> {
    let unread = profile.header.unread?;
    let missing = if unread.records == 0 { "some".to_owned() } else { units::percent(unread.share()) };
    let moment = units::time_of_day(profile.header.time);
    Some(format!("figures are as of {moment}; {missing} of the records sent by then were not read in time"))
}

fn losses(context: &Context) -> Option<String> {
    let counters = &context.profile.counters;
    let lost: Vec<(&str, u64)> = counters
        .iter()
        .filter_map(|(name, &count)| Some((name.strip_prefix(LOST_PREFIX)?, count)))
        .filter(|(name, count)| *count > 0 && *name != IN_FLIGHT)
        .collect();
    let total = lost.iter().fold(0u64, |sum, (_, count)| sum.saturating_add(*count));
    if total == 0 {
        return None;
    }
    let submitted = counters.get("submitted").copied();
    let share = submitted.map_or_else(String::new, |submitted| {
        format!(" ({} of all)", units::percent(total as f64 / (total as f64 + submitted as f64)))
    });
    let reasons: Vec<String> = lost
        .iter()
        .map(|(name, count)| format!("{} {}", name.replace('_', " "), units::count(*count as f64)))
        .collect();
    let covered = covered(context.profile, total);
    Some(format!("{} lost{share}: {}{covered}", plural(total, "sample"), reasons.join(", ")))
}

/// How intervals of allocation allow for lost samples.
fn covered(profile: &Profile, lost: u64) -> String {
    let missing = profile.losses().alloc;
    let found = profile.counters.get("allocations_reconciled").copied().unwrap_or(0);
    if !profile.errors_known() {
        String::new()
    } else if !missing.is_none() {
        format!("; allocated figures may miss {}; error bars allow for it", amount(&missing))
    } else if found >= lost {
        "; all of them were recovered".into()
    } else {
        "; their sizes are not known, so error bars do not allow for them".into()
    }
}

/// Formats a bound: `3 samples (1.50 KiB)`.
fn amount(bound: &LossBound) -> String {
    format!("{} ({})", plural(bound.samples, "sample"), units::bytes(bound.sampled_bytes as f64))
}

/// How lost records may affect figures in use.
fn lost_in_use(context: &Context) -> Option<String> {
    let Losses { inuse_missing, inuse_stale, .. } = context.profile.losses();
    let mut parts = Vec::new();
    if !inuse_missing.is_none() {
        parts.push(format!("may miss {}", amount(&inuse_missing)));
    }
    if !inuse_stale.is_none() {
        parts.push(format!("may include {} already freed", amount(&inuse_stale)));
    }
    let is_known = context.profile.header.live && !parts.is_empty();
    is_known.then(|| format!("records were lost: figures in use {}; error bars allow for it", parts.join(" and ")))
}

/// Remark about processes whose figures in use lack older blocks.
fn since(profile: &Profile) -> Option<String> {
    let (number, last) = profile.inuse_since()?;
    let moment = units::time_of_day(last);
    let late: Vec<&Process> =
        profile.processes.iter().filter(|it| it.inuse_since.is_some() && !it.inuse_unknown).collect();
    let (who, moment) = match late[..] {
        [only] if only.count() == 1 => (process_name(only), moment),
        _ if late.iter().all(|process| process.inuse_since == Some(last)) => (plural(number, "process"), moment),
        _ => (plural(number, "process"), format!("{moment} at the latest")),
    };
    let why = if late.iter().all(|process| process.was_unseen()) {
        "frees were hidden by another recording"
    } else if late.iter().any(|process| process.was_unseen()) {
        "frees were not tracked (overhead budget, or another recording)"
    } else {
        "frees were not tracked, to keep the overhead budget"
    };
    Some(format!("in use in {who}: only blocks allocated since {moment} are known; until then, {why}"))
}

/// Why some figures have no interval.
fn unbounded(context: &Context) -> Vec<String> {
    let number = |is_so: fn(&Process) -> bool| {
        let processes = context.profile.processes.iter().filter(|process| is_so(process));
        processes.count() as u64
    };
    let of = |what: &str, processes: u64, why: &str| {
        let who =
            if processes == 1 { "1 process".into() } else { format!("{} processes", units::count(processes as f64)) };
        (processes > 0)
            .then(|| format!("no error bars for {what} figures of {who}, or for sums that include them: {why}"))
    };
    let figures = of("allocated and in-use", number(|process| process.losses.unbounded), UNBOUNDED);
    let peak = of("in-use", number(|process| process.losses.inuse_unbounded), PEAK_UNKNOWN);
    let weights = of("allocated and in-use", number(|process| process.losses.weights_unproven), WEIGHTS_UNPROVEN);
    let unseen = of("allocated", number(Process::was_unseen), UNSEEN);
    figures.into_iter().chain(peak).chain(weights).chain(unseen).collect()
}

fn incomplete(context: &Context) -> Option<String> {
    let mut reasons: BTreeMap<&str, u64> = BTreeMap::new();
    for row in &context.profile.rows {
        if let Some(cut) = &row.key.stack.cut {
            *reasons.entry(cut).or_default() += row.alloc.samples;
        }
    }
    let samples = context.whole.samples(Value::AllocSpace);
    let cut: u64 = reasons.values().sum();
    if cut == 0 {
        return None;
    }
    let mut reasons: Vec<(&str, u64)> = reasons.into_iter().collect();
    reasons.sort_by_key(|reason| std::cmp::Reverse(reason.1));
    let named: Vec<String> = reasons
        .iter()
        .take(MOST)
        .map(|(reason, count)| format!("{reason} ({})", units::count(*count as f64)))
        .collect();
    Some(format!(
        "{} of {} ({}) have an incomplete stack: {}{}",
        units::count(cut as f64),
        plural(samples, "sample"),
        units::percent(cut as f64 / samples.max(1) as f64),
        named.join(", "),
        incomplete_by_program(context)
    ))
}

/// The share of samples with an incomplete stack in each program that has any, if there are several programs.
fn incomplete_by_program(context: &Context) -> String {
    let mut programs = entries(context, GroupBy::Program);
    let is_alone = programs.len() == 1;
    programs.retain(|program| program.pool.incomplete_samples() > 0);
    if is_alone || programs.is_empty() {
        return String::new();
    }
    let share = |program: &Entry| program.pool.incomplete_share();
    programs.sort_by(|a, b| share(b).total_cmp(&share(a)).then_with(|| a.name.cmp(&b.name)));
    let shown =
        programs.iter().take(MOST).map(|program| format!("{} {}", program.name, units::percent(share(program))));
    let more = if programs.len() > MOST { ", …" } else { "" };
    format!("; by program: {}{more}", shown.collect::<Vec<_>>().join(", "))
}

/// Processes whose samples contradict their exact counts, with the counters that may explain it.
fn distant(context: &Context) -> Vec<String> {
    let remark = |entry: Entry| {
        let check = entry.checked(context).filter(|check| check.alarming)?;
        let apart = check.z.map_or_else(
            || "differ where they must be equal".to_owned(),
            |z| format!("are {:.1} standard deviations apart", z.abs()),
        );
        Some(format!(
            "{}: estimate and exact count {apart}, which chance does not explain ({}); do not trust this process's figures",
            entry.name,
            cause(context.profile)
        ))
    };
    entries(context, GroupBy::Process).into_iter().filter_map(remark).collect()
}

/// Counters that may explain a difference between samples and exact counts.
fn cause(profile: &Profile) -> String {
    let moved: Vec<String> = profile
        .counters
        .iter()
        .filter(|(name, count)| {
            let is_lost = name.strip_prefix(LOST_PREFIX).is_some_and(|reason| reason != IN_FLIGHT);
            **count > 0 && (is_lost || *name == "records_unknown")
        })
        .map(|(name, count)| format!("{name} is {}", units::count(*count as f64)))
        .collect();
    if moved.is_empty() { "no loss was counted, so a probe or a counter is broken".into() } else { moved.join(", ") }
}

/// For how much of their time processes were observed.
fn coverage(context: &Context) -> Vec<String> {
    let (unseen, others): (Vec<_>, Vec<_>) = context.profile.processes.iter().partition(|process| process.was_unseen());
    let mut remarks = short(
        &unseen,
        "their allocations while another recording counted them are missing",
        "its allocations while another recording counted it are missing",
    );
    // Figures from time windows (older recordings) are corrected for what happened between windows; a note says so.
    if !context.profile.header.time_windows {
        let late: Vec<_> = others.into_iter().filter(|process| process.coverage < 0.9995).collect();
        remarks.extend(short(&late, "the rest is missing", "the rest is missing"));
    }
    remarks
}

/// Remarks about processes of which something is missing; many processes share one remark.
fn short(processes: &[&Process], of_many: &str, of_one: &str) -> Vec<String> {
    let least = processes.iter().min_by(|a, b| a.coverage.total_cmp(&b.coverage));
    if let Some(least) = least.filter(|_| processes.len() > SEPARATE) {
        let number: u64 = processes.iter().map(|process| process.count()).sum();
        return vec![format!(
            "{} were counted for only part of their time in the recording (least: {}, {}); {of_many}",
            plural(number, "process"),
            process_name(least),
            units::percent(least.coverage)
        )];
    }
    let remark = |process: &&Process| {
        format!(
            "{} was counted for {} of its time in the recording; {of_one}",
            process_name(process),
            units::percent(process.coverage)
        )
    };
    processes.iter().map(remark).collect()
}
