//! Remarks below the figures: losses, incomplete stacks, coverage, notes.

use std::collections::BTreeMap;

use super::processes::{Entry, entries};
use super::{Context, hooking, plural};
use crate::estimates::{NO_SAMPLES, TIME_WINDOWS};
use crate::group::{GroupBy, process_name};
use crate::loss_bounds::{PEAK_UNKNOWN, UNBOUNDED, UNSEEN, WEIGHTS_UNPROVEN};
use crate::model::{LOST_PREFIX, LossBound, Losses, Process, Profile, Row};
use crate::units;
use crate::value::Value;

/// The counter of calls in flight at the end of the recording, which are not lost.
const IN_FLIGHT: &str = "in_flight";

/// Maximum number of remarks of one kind, because a host has thousands of processes.
const MOST: usize = 5;

/// Text that identifies notes about what is in no figure.
const IN_NO_FIGURE: [&str; 4] = ["not counted: ", "is missing", "is not included", "are not included"];

/// Share of a reason against inline hooks, and of a remark about what is in no figure if its share is unknown. It only
/// decides the order.
const UNKNOWN_SHARE: f64 = 0.01;

/// Maximum number of processes that get an individual remark about how long they were hooked.
const SEPARATE: usize = 2;

/// Lines of the section; empty if there are no remarks.
pub(super) fn section(context: &Context) -> Vec<String> {
    all(context).iter().flat_map(|remark| context.marked(remark)).collect()
}

/// A remark in one line.
pub(super) struct Remark {
    pub(super) text: String,
    /// Share of the bytes or calls that it is about, 0 to 1; `None` if unknown. It is only for the order.
    share: Option<f64>,
}

impl Remark {
    fn new(text: String, share: f64) -> Self {
        Self { text, share: Some(share) }
    }

    /// Remarks of a higher rank come first.
    fn rank(&self) -> f64 {
        self.share.unwrap_or(if is_in_no_figure(&self.text) { UNKNOWN_SHARE } else { 0.0 })
    }
}

/// Whether a note is about something that no figure has.
pub(super) fn is_in_no_figure(note: &str) -> bool {
    IN_NO_FIGURE.iter().any(|part| note.contains(part))
}

/// Whether such a note begins with what a process lacks. Further on, notes have names of processes and files, which may
/// be anything.
pub(super) fn is_about(note: &str, what: &str) -> bool {
    !what.is_empty() && note.strip_prefix(IN_NO_FIGURE[0]).unwrap_or(note).starts_with(what)
}

/// All remarks, each in one line. Those about the largest share of bytes or calls come first.
pub(super) fn all(context: &Context) -> Vec<String> {
    let (texts, more) = ordered(kinds(context));
    let more = (more > 0).then(|| format!("and {}", plural(more as u64, "more remark")));
    texts.into_iter().chain(more).collect()
}

/// All remarks, and why processes were not hooked inline; and the number of further ones. The complete report has a
/// section for the reasons.
pub(super) fn with_refusals(context: &Context) -> (Vec<String>, usize) {
    let (refusals, more_reasons) = hooking::refusals(context.profile);
    // Probes count these processes: what is missing comes first.
    let refusals = refusals.into_iter().map(|text| Remark::new(text, UNKNOWN_SHARE)).collect();
    let (texts, more) = ordered(std::iter::once(refusals).chain(kinds(context)).collect());
    (texts, more + more_reasons)
}

/// The remarks by kind.
fn kinds(context: &Context) -> Vec<Vec<Remark>> {
    let (profile, shares) = (context.profile, byte_shares(context.profile));
    let mut kinds = vec![Vec::from_iter(without_requested(context)), of_losses(context).collect()];
    if profile.header.samples_known {
        kinds.push(Vec::from_iter(lost_in_use(context)));
        kinds.push(unbounded(profile, &shares));
    }
    kinds.push(Vec::from_iter(since(profile, &shares)));
    kinds.push(Vec::from_iter(incomplete(context)));
    kinds.push(distant(context));
    kinds.push(coverage(profile, &shares));
    let without_bars = if !profile.header.samples_known {
        Some(format!("no error bars: {NO_SAMPLES}"))
    } else if profile.header.time_windows {
        Some(format!("no error bars for allocations: {TIME_WINDOWS}"))
    } else {
        None
    };
    kinds.push(without_bars.into_iter().map(|text| Remark::new(text, 1.0)).collect());
    let all_bytes = context.whole.total(Value::AllocSpace).max(1.0);
    let unnamed = crate::unnamed::modules(profile).into_iter();
    let unnamed = unnamed.filter_map(|(module, bytes)| Some((module.reason.as_deref()?.to_owned(), bytes)));
    kinds.push(unnamed.map(|(reason, bytes)| Remark::new(reason, bytes / all_bytes)).collect());
    let share = |note: &str| share_in(note).or_else(|| share_missing(profile, note));
    let notes = profile.notes.iter().filter(|note| context.options.said.as_ref() != Some(note));
    kinds.push(notes.map(|note| Remark { text: note.clone(), share: share(note) }).collect());
    kinds
}

/// The texts of the remarks in order, with at most [`MOST`] of each kind; and the number of further ones.
fn ordered(kinds: Vec<Vec<Remark>>) -> (Vec<String>, usize) {
    let sort = |remarks: &mut Vec<Remark>| remarks.sort_by(|a, b| b.rank().total_cmp(&a.rank()));
    let (mut all, mut more) = (Vec::new(), 0);
    for mut kind in kinds {
        sort(&mut kind);
        more += kind.len().saturating_sub(MOST);
        all.extend(kind.into_iter().take(MOST));
    }
    sort(&mut all);
    (all.into_iter().map(|remark| remark.text).collect(), more)
}

/// The share in a note such as `7 samples were lost (2.10 %): why`, 0 to 1. Other notes may look like that.
fn share_in(note: &str) -> Option<f64> {
    let (percent, _) = note.split_once(" (")?.1.split_once(" %): ")?;
    let percent: f64 = percent.parse().ok()?;
    (0.0..=100.0).contains(&percent).then_some(percent / 100.0)
}

/// Share of each process in the bytes allocated.
fn byte_shares(profile: &Profile) -> Vec<f64> {
    let sum = |rows: Vec<&Row>| rows.iter().map(|row| row.alloc.bytes).sum::<f64>() + 0.0;
    let bytes: Vec<f64> = profile.rows_of_processes().into_iter().map(sum).collect();
    let all = bytes.iter().sum::<f64>().max(1.0);
    bytes.into_iter().map(|bytes| bytes / all).collect()
}

/// The share that is missing according to a note about what is in no figure: of the targets' anonymous memory, that
/// outside heaps that are counted, in the processes that lack what the note begins with. `None` if there is none.
fn share_missing(profile: &Profile, note: &str) -> Option<f64> {
    if !is_in_no_figure(note) {
        return None;
    }
    let (mut missing, mut all) = (0.0, 0.0);
    for process in profile.processes.iter().chain(&profile.idle) {
        let Some(resident) = &process.resident else { continue };
        let parts = [resident.jit_code_bytes, resident.not_seen_bytes(), resident.undivided_bytes];
        let (heap, others) = (resident.heap_bytes as f64, parts.iter().map(|bytes| *bytes as f64).sum::<f64>());
        all += heap + others;
        if process.missing.iter().any(|it| is_about(note, &it.what)) {
            missing += heap + others - process.counted_heap_bytes() as f64;
        }
    }
    (missing > 0.0).then(|| missing / all)
}

/// Remarks about what was not read or was lost.
pub(super) fn of_losses(context: &Context) -> impl Iterator<Item = Remark> {
    unread(context.profile).into_iter().chain(losses(context))
}

/// Remark if the profile lacks the requested sort value. It comes first.
fn without_requested(context: &Context) -> Option<Remark> {
    let requested = context.options.sort.filter(|value| !super::has(context.profile, *value))?;
    let instead = context.sort.title();
    let text = format!(
        "no {} in this profile: frees were not tracked (--no-live); sorted by {instead} instead",
        requested.name()
    );
    Some(Remark::new(text, f64::INFINITY))
}

/// Remark about records that were sent before the time of the figures but not read.
fn unread(profile: &Profile) -> Option<Remark> {
    let unread = profile.header.unread?;
    let missing = if unread.records == 0 { "some".to_owned() } else { units::percent(unread.share()) };
    let moment = units::time_of_day(profile.header.time);
    let text = format!("figures are as of {moment}; {missing} of the records sent by then were not read in time");
    Some(Remark::new(text, unread.share()))
}

fn losses(context: &Context) -> Option<Remark> {
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
    let share_of = |submitted: u64| total as f64 / (total as f64 + submitted as f64);
    let share =
        submitted.map_or_else(String::new, |submitted| format!(" ({} of all)", units::percent(share_of(submitted))));
    let reasons: Vec<String> = lost
        .iter()
        .map(|(name, count)| format!("{} {}", name.replace('_', " "), units::count(*count as f64)))
        .collect();
    let covered = covered(context.profile, total);
    let text = format!("{} lost{share}: {}{covered}", plural(total, "sample"), reasons.join(", "));
    Some(Remark::new(text, share_of(submitted.unwrap_or_else(|| context.whole.samples(Value::AllocSpace)))))
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
fn lost_in_use(context: &Context) -> Option<Remark> {
    let Losses { inuse_missing, inuse_stale, .. } = context.profile.losses();
    let mut parts = Vec::new();
    if !inuse_missing.is_none() {
        parts.push(format!("may miss {}", amount(&inuse_missing)));
    }
    if !inuse_stale.is_none() {
        parts.push(format!("may include {} already freed", amount(&inuse_stale)));
    }
    let is_known = context.profile.header.live && !parts.is_empty();
    let touched = inuse_missing.samples.max(inuse_stale.samples) as f64;
    let share = touched / (context.whole.samples(Value::InuseSpace) as f64 + touched).max(1.0);
    let text = || format!("records were lost: figures in use {}; error bars allow for it", parts.join(" and "));
    is_known.then(|| Remark::new(text(), share))
}

/// Remark about processes whose figures in use lack older blocks.
fn since(profile: &Profile, shares: &[f64]) -> Option<Remark> {
    let (number, last) = profile.inuse_since()?;
    let moment = units::time_of_day(last);
    let late = profile.processes.iter().zip(shares).filter(|(it, _)| it.inuse_since.is_some() && !it.inuse_unknown);
    let (late, shares): (Vec<&Process>, Vec<f64>) = late.unzip();
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
    let text = format!("in use in {who}: only blocks allocated since {moment} are known; until then, {why}");
    Some(Remark::new(text, shares.iter().sum()))
}

/// Why some figures have no interval.
fn unbounded(profile: &Profile, shares: &[f64]) -> Vec<Remark> {
    // Their number, and their share of the bytes.
    let number = |is_so: fn(&Process) -> bool| {
        let processes = profile.processes.iter().zip(shares).filter(|(process, _)| is_so(process));
        processes.fold((0_u64, 0.0_f64), |(number, sum), (_, share)| (number + 1, sum + share))
    };
    let of = |what: &str, (processes, share): (u64, f64), why: &str| {
        let who = plural(processes, "process");
        let text = || format!("no error bars for {what} figures of {who}, or for sums that include them: {why}");
        (processes > 0).then(|| Remark::new(text(), share))
    };
    let figures = of("allocated and in-use", number(|process| process.losses.unbounded), UNBOUNDED);
    let peak = of("in-use", number(|process| process.losses.inuse_unbounded), PEAK_UNKNOWN);
    let weights = of("allocated and in-use", number(|process| process.losses.weights_unproven), WEIGHTS_UNPROVEN);
    let unseen = of("allocated", number(Process::was_unseen), UNSEEN);
    figures.into_iter().chain(peak).chain(weights).chain(unseen).collect()
}

/// Number of samples with an incomplete stack, by the reason why it was cut.
pub(super) fn cut_samples(profile: &Profile) -> BTreeMap<&str, u64> {
    let mut samples: BTreeMap<&str, u64> = BTreeMap::new();
    for row in &profile.rows {
        if let Some(cut) = &row.key.stack.cut {
            *samples.entry(cut).or_default() += row.alloc.samples;
        }
    }
    samples
}

fn incomplete(context: &Context) -> Option<Remark> {
    let reasons = cut_samples(context.profile);
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
    let share = cut as f64 / samples.max(1) as f64;
    let text = format!(
        "{} of {} ({}) have an incomplete stack: {}{}",
        units::count(cut as f64),
        plural(samples, "sample"),
        units::percent(share),
        named.join(", "),
        incomplete_by_program(context)
    );
    Some(Remark::new(text, share))
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
fn distant(context: &Context) -> Vec<Remark> {
    let all_bytes = context.whole.total(Value::AllocSpace).max(1.0);
    let remark = |entry: Entry| {
        let check = entry.checked(context).filter(|check| check.alarming)?;
        let apart = check.z.map_or_else(
            || "differ where they must be equal".to_owned(),
            |z| format!("are {:.1} standard deviations apart", z.abs()),
        );
        let text = format!(
            "{}: estimate and exact count {apart}, which chance does not explain ({}); do not trust this process's figures",
            entry.name,
            cause(context.profile)
        );
        Some(Remark::new(text, entry.pool.total(Value::AllocSpace) / all_bytes))
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
fn coverage(profile: &Profile, shares: &[f64]) -> Vec<Remark> {
    let processes = profile.processes.iter().zip(shares.iter().copied());
    let (unseen, others): (Vec<_>, Vec<_>) = processes.partition(|(process, _)| process.was_unseen());
    let mut remarks = short(
        &unseen,
        "their allocations while another recording counted them are missing",
        "its allocations while another recording counted it are missing",
    );
    // Figures from time windows (older recordings) are corrected for what happened between windows; a note says so.
    if !profile.header.time_windows {
        let late: Vec<_> = others.into_iter().filter(|(process, _)| process.coverage < 0.9995).collect();
        remarks.extend(short(&late, "the rest is missing", "the rest is missing"));
    }
    remarks
}

/// Remarks about processes of which something is missing; many processes share one remark. Each process has its share
/// of the bytes.
fn short(processes: &[(&Process, f64)], of_many: &str, of_one: &str) -> Vec<Remark> {
    let missed = |(process, share): &(&Process, f64)| (1.0 - process.coverage) * share;
    // Of a process without samples, nothing is known.
    let remark = |text: String, missed: f64| Remark { text, share: Some(missed).filter(|missed| *missed > 0.0) };
    let least = processes.iter().map(|(process, _)| process).min_by(|a, b| a.coverage.total_cmp(&b.coverage));
    if let Some(least) = least.filter(|_| processes.len() > SEPARATE) {
        let number: u64 = processes.iter().map(|(process, _)| process.count()).sum();
        let text = format!(
            "{} were counted for only part of their time in the recording (least: {}, {}); {of_many}",
            plural(number, "process"),
            process_name(least),
            units::percent(least.coverage)
        );
        return vec![remark(text, processes.iter().map(missed).sum())];
    }
    let one = |it: &(&Process, f64)| {
        let text = format!(
            "{} was counted for {} of its time in the recording; {of_one}",
            process_name(it.0),
            units::percent(it.0.coverage)
        );
        remark(text, missed(it))
    };
    processes.iter().map(one).collect()
}
