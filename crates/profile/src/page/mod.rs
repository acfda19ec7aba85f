//! The web page: one file with all its code (`web/`) and the data that it shows.

mod calls;
mod figures;
mod growth;
mod kept;
mod layout;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use serde::Serialize;

use self::figures::{Boxes, Column, Figure};
pub use self::growth::{GrowthData, growth_data};
pub use self::kept::{KeptData, kept_data};
pub use self::layout::Layout;
use self::layout::Pooled;
use crate::escape::escaped_json;
use crate::estimates::{Pool, SharedLosses, exact, intervals_used};
use crate::formats::WriteOptions;
use crate::group::{GroupBy, Groups};
use crate::model::{Lifetimes, Process, Profile};
use crate::process_pools::pools_of_processes;
use crate::report::{Growing, ReportOptions, ResidentText, growing, remarks, resident_texts, subject};
use crate::units;
use crate::value::Value;
use heapbpf_statistics::survival;

/// The page, with a placeholder for its data. Built by `cargo xtask web`.
pub const PAGE: &str = include_str!("../../../../web/dist/page.html");
/// The placeholder. In a page that gets its data from a server, it is empty.
const PLACE: &str = "@DATA@";

/// Maximum number of processes listed individually, and maximum number of idle ones.
const MOST_PROCESSES: usize = 500;
/// Maximum number of stacks with a lifetime curve.
const MOST_CURVES: usize = 2_000;
/// Maximum number of stacks; beyond that the smallest are left out.
const MOST_STACKS: usize = 100_000;

/// What the page shows of one profile.
#[derive(Serialize)]
pub struct PageData {
    version: String,
    host: String,
    subject: String,
    started_ms: u64,
    time_ms: u64,
    duration_seconds: f64,
    interval: u64,
    criterion: &'static str,
    confidence: f64,
    /// Whether frees were followed, so that there are figures in use.
    live: bool,
    values: Vec<PageValue>,
    /// Index of the value to show first.
    active: usize,
    /// One figure per value.
    totals: Vec<Figure>,
    groups: Vec<Group>,
    /// Number of all targets; `processes` has the largest, and also idle ones that have ended.
    targets: u64,
    processes: Vec<ProcessEntry>,
    /// Functions that grow; `None` if the profile has no growth figures.
    growing: Option<Vec<Growing>>,
    remarks: Vec<String>,
    counters: std::collections::BTreeMap<String, u64>,
    #[serde(flatten)]
    layout: Arc<Layout>,
    /// One column per value.
    columns: Vec<Column>,
    sizes: Sizes,
    lifetimes: Vec<Option<StackLifetimes>>,
    boxes: Boxes,
}

impl PageData {
    /// The layout of the stacks, to be reused for the next page of the same recording.
    pub const fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }
}

#[derive(Serialize)]
struct PageValue {
    name: &'static str,
    title: &'static str,
    unit: &'static str,
}

/// A program, or another group of processes.
#[derive(Serialize)]
struct Group {
    name: String,
    processes: u64,
    totals: Vec<Figure>,
    resident: Option<ResidentText>,
}

#[derive(Default, Serialize)]
struct ProcessEntry {
    pid: u32,
    comm: String,
    group: String,
    count: u64,
    hook: Option<&'static str>,
    not_inline: Option<String>,
    coverage: f64,
    ended: bool,
    not_hooked: usize,
    allocators: Vec<String>,
    totals: Vec<Figure>,
    resident: Option<ResidentText>,
}

/// Sizes of sampled blocks, by stack.
#[derive(Default, Serialize)]
struct Sizes {
    smallest: Vec<u64>,
    largest: Vec<u64>,
}

/// Lifetimes of a stack's blocks.
#[derive(Serialize)]
struct StackLifetimes {
    median: Option<f64>,
    temporary: f64,
    /// Age in seconds, and the share that lives longer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    curve: Vec<(f64, f64)>,
}

/// The page for one profile, without a server.
///
/// # Errors
/// The data cannot be encoded.
pub fn static_page(data: &PageData, report: &str, growth: Option<&GrowthData>) -> serde_json::Result<String> {
    #[derive(Serialize)]
    struct Static<'a> {
        profile: &'a PageData,
        report: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        growth: Option<&'a GrowthData>,
    }
    let data = serde_json::to_string(&Static { profile: data, report, growth })?;
    let (before, after) = PAGE.split_once(PLACE).unwrap_or((PAGE, ""));
    // A name that contains "</script>" must not end the data.
    Ok([before, &escaped_json(&data.replace('<', "\\u003c")), after].concat())
}

/// The page for a server, from which it requests its data.
pub fn served_page() -> String {
    PAGE.replacen(PLACE, "", 1)
}

/// The page's content security policy: only its own code runs, and it connects only to its own server.
pub fn served_policy() -> &'static str {
    let begin = "Content-Security-Policy\" content=\"";
    PAGE.split_once(begin).and_then(|(_, rest)| rest.split_once('"')).map_or("default-src 'none'", |(policy, _)| policy)
}

/// Maximum number of functions listed as growing.
const MOST_GROWING: usize = 5;

/// Builds the data of a page.
pub fn page_data(profile: &Profile, shown: Value, options: &WriteOptions) -> PageData {
    next_page_data(profile, shown, options, None)
}

/// Like [`page_data`], but reuses the previous page's layout if it fits; then only the figures are computed.
pub fn next_page_data(profile: &Profile, shown: Value, options: &WriteOptions, last: Option<Arc<Layout>>) -> PageData {
    let WriteOptions { confidence, frames, .. } = *options;
    let values = Value::shown_of(profile);
    let by = options.group_by.unwrap_or(GroupBy::Program);
    let last = last.filter(|last| last.fits(profile, by));
    let layout = last.unwrap_or_else(|| Arc::new(Layout::new(profile, by, shown, frames.rules)));
    let mut stacks = layout.pooled(profile);
    let intervals = intervals_used(profile);
    let mut losses = SharedLosses::default();
    for Pooled { pool, .. } in &mut stacks {
        pool.allow_for(&intervals);
        losses.give_to(pool, profile);
    }
    let boxes = Boxes::of(profile, &layout, &stacks, values, confidence, &mut losses);
    let pools: Vec<&Pool> = stacks.iter().map(|stack| &stack.pool).collect();
    let whole = Pool::whole(profile);
    PageData {
        version: profile.header.version.clone(),
        host: profile.header.host.clone(),
        subject: subject(profile),
        started_ms: units::unix_ms(profile.header.started),
        time_ms: units::unix_ms(profile.header.time),
        duration_seconds: profile.header.duration.as_secs_f64(),
        interval: profile.header.interval,
        criterion: profile.header.criterion.name(),
        confidence,
        live: profile.header.live,
        values: values.iter().map(|it| PageValue { name: it.name(), title: it.title(), unit: it.unit() }).collect(),
        active: values.iter().position(|&value| value == shown).unwrap_or(0),
        totals: figures(profile, &whole, values, confidence, None),
        groups: groups(profile, &layout, by, values, confidence),
        targets: profile.number_of_targets(),
        processes: processes(profile, by, shown, values, confidence),
        growing: growing(profile, confidence, frames, MOST_GROWING),
        remarks: remarks(profile, &ReportOptions { group_by: Some(by), confidence, ..ReportOptions::default() }),
        counters: profile.counters.clone(),
        columns: values.iter().map(|&value| Column::of(profile, &pools, value, confidence)).collect(),
        sizes: Sizes::of(&pools),
        lifetimes: lifetimes(&stacks, shown),
        boxes,
        layout,
    }
}

fn figures(profile: &Profile, pool: &Pool, values: &[Value], confidence: f64, process: Option<usize>) -> Vec<Figure> {
    let figure = |&value: &Value| Figure::of(profile, pool, value, confidence, exact(profile, process, value));
    values.iter().map(figure).collect()
}

/// The figures of the groups.
fn groups(profile: &Profile, layout: &Layout, by: GroupBy, values: &[Value], confidence: f64) -> Vec<Group> {
    let mut resident = resident_of_groups(profile, by, confidence);
    let names = Groups::new(profile, by);
    // The processes of each group, also those without samples, and its idle ones.
    let mut members: BTreeMap<String, (Vec<usize>, Vec<&Process>)> = BTreeMap::new();
    if by != GroupBy::Thread {
        for it in 0..profile.processes.len() {
            members.entry(names.of_process(it).into_owned()).or_default().0.push(it);
        }
    }
    for (it, process) in profile.idle.iter().enumerate() {
        members.entry(names.of_idle(it).into_owned()).or_default().1.push(process);
    }
    let intervals = intervals_used(profile);
    let group = |(name, (mut pool, mut processes)): (&String, (Pool, BTreeSet<usize>))| {
        let (counted, idle) = members.remove(name).unwrap_or_default();
        processes.extend(counted);
        pool.allow_for(&intervals);
        pool.cover(processes.iter().copied());
        let exact_of = |value| {
            let mut counted = processes.iter().map(|&it| exact(profile, Some(it), value));
            counted.try_fold(0u64, |sum, it| sum.checked_add(it?))
        };
        let totals = values.iter().map(|&it| Figure::of(profile, &pool, it, confidence, exact_of(it))).collect();
        let count = number_of(profile, processes.iter(), &idle);
        Group { name: name.clone(), processes: count, totals, resident: resident.remove(name) }
    };
    let mut groups: Vec<Group> = layout.groups.iter().zip(layout.pooled_groups(profile)).map(group).collect();
    if by != GroupBy::Thread {
        // Stacks refer to groups by their index in the list, so idle ones come last.
        let idle = members.into_iter().filter(|(_, (_, idle))| !idle.is_empty());
        groups.extend(idle.map(|(name, (counted, idle))| {
            let resident = resident.remove(&name);
            let processes = number_of(profile, counted.iter(), &idle);
            Group { name, processes, totals: Vec::new(), resident }
        }));
    }
    groups
}

/// Number of processes of a group, as in its name.
fn number_of<'a>(profile: &Profile, counted: impl Iterator<Item = &'a usize>, idle: &[&Process]) -> u64 {
    let counted: u64 = counted.filter_map(|it| profile.processes.get(*it)).map(Process::count).sum();
    let running = counted + idle.iter().filter(|process| !process.ended).count() as u64;
    if running > 0 { running } else { idle.len() as u64 }
}

/// How the memory of each group is used, by group name. Threads have no memory of their own.
fn resident_of_groups(profile: &Profile, by: GroupBy, confidence: f64) -> HashMap<String, ResidentText> {
    if by == GroupBy::Thread {
        return HashMap::new();
    }
    resident_texts(profile, by, confidence).into_iter().map(|it| (it.name.clone(), it)).collect()
}

/// The largest processes.
fn processes(profile: &Profile, by: GroupBy, sort: Value, values: &[Value], confidence: f64) -> Vec<ProcessEntry> {
    let groups = Groups::new(profile, by);
    let pools = pools_of_processes(profile);
    let mut order: Vec<usize> = (0..pools.len()).collect();
    order.sort_by(|&a, &b| pools[b].total(sort).total_cmp(&pools[a].total(sort)));
    order.truncate(MOST_PROCESSES);
    let resident = resident_texts(profile, GroupBy::Process, confidence);
    let (counted, idle): (Vec<_>, Vec<_>) = resident.into_iter().partition(|it| it.idle.is_empty());
    let by_number = |texts: Vec<ResidentText>, number: fn(&ResidentText) -> Option<usize>| -> HashMap<_, _> {
        texts.into_iter().filter_map(|it| Some((number(&it)?, it))).collect()
    };
    let mut resident = by_number(counted, |it| it.processes.first().copied());
    let mut idle_resident = by_number(idle, |it| it.idle.first().copied());
    let entry = |index: usize| {
        let process = &profile.processes[index];
        let missing = process.audit.iter().map(|file| file.missing.len()).sum::<usize>() + process.missing.len();
        ProcessEntry {
            pid: process.pid,
            comm: process.comm.clone(),
            group: groups.of_process(index).into_owned(),
            count: process.count(),
            hook: process.hook.map(|hook| hook.name()),
            not_inline: process.not_inline.clone(),
            coverage: process.coverage,
            ended: process.ended,
            not_hooked: missing,
            allocators: process.allocators.clone(),
            totals: figures(profile, &pools[index], values, confidence, Some(index)),
            resident: resident.remove(&index),
        }
    };
    let mut largest: Vec<(usize, &Process)> = profile.idle.iter().enumerate().collect();
    largest.sort_by_key(|(_, process)| Reverse(process.resident.map_or(0, |it| it.total_bytes())));
    let idle = largest.into_iter().take(MOST_PROCESSES).map(|(index, process)| ProcessEntry {
        pid: process.pid,
        comm: process.comm.clone(),
        group: groups.of_idle(index).into_owned(),
        count: u64::from(!process.ended),
        ended: process.ended,
        not_hooked: process.missing.len(),
        resident: idle_resident.remove(&index),
        ..ProcessEntry::default()
    });
    order.into_iter().map(entry).chain(idle).collect()
}

impl Sizes {
    fn of(pools: &[&Pool]) -> Self {
        let mut sizes = Self::default();
        for pool in pools {
            let sampled = || pool.sums(Value::AllocSpace).map(|(_, sums)| sums).filter(|sums| sums.samples > 0);
            sizes.smallest.push(sampled().map(|sums| sums.smallest_bytes).min().unwrap_or(0));
            sizes.largest.push(sampled().map(|sums| sums.largest_bytes).max().unwrap_or(0));
        }
        sizes
    }
}

/// Lifetimes of each stack; only the largest stacks have their curves.
fn lifetimes(stacks: &[Pooled], by: Value) -> Vec<Option<StackLifetimes>> {
    if stacks.iter().all(|stack| stack.lifetimes.is_empty()) {
        return stacks.iter().map(|_| None).collect();
    }
    let mut sizes: Vec<f64> = stacks.iter().map(|stack| stack.pool.total(by)).collect();
    sizes.sort_by(|a, b| b.total_cmp(a));
    let least = sizes.get(MOST_CURVES).copied().unwrap_or(f64::NEG_INFINITY);
    let one = |stack: &Pooled| {
        let Lifetimes { median_seconds, temporary, survival, .. } = survival::pooled(&stack.lifetimes)?;
        let curve = if stack.pool.total(by) > least { survival } else { Vec::new() };
        Some(StackLifetimes { median: median_seconds, temporary, curve })
    };
    stacks.iter().map(one).collect()
}

#[cfg(test)]
mod tests;
