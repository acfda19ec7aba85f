//! The table of programs or processes, one per line, with estimates and exact counts.

use std::borrow::Cow;
use std::collections::HashSet;

use indexmap::IndexMap;

use super::Context;
use super::suspects::{lately, rate};
use crate::diff::growth::{Grown, growth};
use crate::estimates::{Pool, exact};
use crate::group::{GroupBy, Groups};
use crate::model::{LossBound, Process, Profile, Resident, Row};
use crate::process_pools::pools_of_processes;
use crate::programs;
use crate::report::figure::FigureText;
use crate::report::text::{Column, Style, Table, clip};
use crate::units;
use crate::value::Value;
use heapbpf_audit::Hook;
use heapbpf_statistics::calibrate::{SELF_CHECK_CONFIDENCE, SelfCheck, self_check};
use heapbpf_statistics::estimate::Estimate;
use heapbpf_statistics::interval::Interval;

/// Maximum number of programs or processes in the table.
const MOST: usize = 10;
/// Title of the column of growth.
const GROWING: &str = "GROWING";

/// A line of the table: a program or a process.
#[derive(Default)]
pub(super) struct Entry {
    /// Its name.
    pub(super) name: String,
    /// Indices of its processes.
    pub(super) processes: Vec<usize>,
    /// Indices of its idle processes in the list of idle ones.
    pub(super) idle: Vec<usize>,
    /// The samples of all its rows.
    pub(super) pool: Pool,
}

impl Entry {
    /// Its processes, including idle ones.
    pub(super) fn members<'a>(&'a self, profile: &'a Profile) -> impl Iterator<Item = &'a Process> {
        let counted = self.processes.iter().map(|&process| &profile.processes[process]);
        counted.chain(self.idle.iter().map(|&process| &profile.idle[process]))
    }

    /// Whether nothing was counted in it.
    pub(super) fn is_idle(&self) -> bool {
        self.processes.is_empty()
    }

    /// Number of processes that were counted.
    fn count(&self, profile: &Profile) -> u64 {
        self.processes.iter().map(|&process| profile.processes[process].count()).sum()
    }

    /// The exact count of a value, if everything was counted.
    fn exact(&self, profile: &Profile, value: Value) -> Option<u64> {
        let sum = || self.processes.iter().try_fold(0u64, |sum, &it| sum.checked_add(exact(profile, Some(it), value)?));
        if self.is_idle() { None } else { sum() }
    }

    /// Whether every process has ended.
    pub(super) fn has_ended(&self, profile: &Profile) -> bool {
        self.members(profile).all(|process| process.ended)
    }

    /// Whether every process was hooked inline.
    fn is_inline(&self, profile: &Profile) -> bool {
        self.members(profile).all(|process| process.hook == Some(Hook::Inline))
    }

    fn may_hold_at_exit(&self, profile: &Profile) -> bool {
        self.processes.iter().any(|&process| profile.may_hold_at_exit(process))
    }

    /// Share of time during which allocators were hooked: the mean over its processes.
    fn coverage(&self, profile: &Profile) -> f64 {
        let weight = |&process: &usize| {
            let process = &profile.processes[process];
            process.coverage * process.count() as f64
        };
        self.processes.iter().map(weight).sum::<f64>() / self.count(profile).max(1) as f64
    }

    /// How fast its memory in use grows or shrinks per second, unless that may be chance.
    fn growing(&self, context: &Context) -> String {
        let profile = context.profile;
        if profile.header.growth_over.is_none() {
            return String::new();
        }
        let processes: HashSet<usize> = self.processes.iter().copied().collect();
        let rows: Vec<&Row> = profile.rows.iter().filter(|row| processes.contains(&row.key.process)).collect();
        let grown = growth(profile, &rows, context.options.confidence);
        let is_sure = |grown: &Grown| {
            let Estimate { low, high, .. } = grown.per_second;
            low.is_some_and(|low| low > 0.0) || high.is_some_and(|high| high < 0.0)
        };
        grown.filter(is_sure).map_or_else(String::new, |grown| rate(&grown).0)
    }

    /// The text of a value.
    pub(super) fn figure(&self, context: &Context, value: Value) -> FigureText {
        let (profile, pool) = (context.profile, &self.pool);
        match value {
            Value::AtExitSpace if self.is_idle() => FigureText::default(),
            _ if self.is_idle() => FigureText { figure: "–".into(), ..FigureText::default() },
            // A process that has not ended has no figures at exit.
            Value::AtExitSpace if !self.may_hold_at_exit(profile) && pool.total(value) == 0.0 => FigureText::default(),
            // A process that has ended has nothing in use.
            Value::InuseSpace if profile.header.ended_apart && self.has_ended(profile) => {
                context.figure(pool, value).quiet_if_unseen(profile, pool, value)
            }
            value => match self.exact(profile, value) {
                // It was hooked throughout, so its count is the true value. The estimate also stands for other
                // processes.
                Some(exact) if profile.header.time_windows => FigureText::exactly(exact, value),
                _ => context.figure(pool, value),
            },
        }
    }

    /// Compares the estimate with the exact count: for bytes, or for calls if only their number has an interval
    /// (criterion `allocations`). `None` if there is no exact count or no interval.
    pub(super) fn checked(&self, context: &Context) -> Option<SelfCheck> {
        let profile = context.profile;
        if !profile.header.samples_known || profile.header.interval == 0 {
            return None;
        }
        // Samples of allocations that were counted after the time of the samples are treated as missing.
        let mut later = LossBound::default();
        self.processes.iter().for_each(|&process| later.add(&profile.processes[process].slack));
        [Value::AllocSpace, Value::AllocObjects].into_iter().find_map(|value| {
            let counted = self.exact(profile, value)? as f64;
            let found = self.pool.raw_estimate(profile, value, SELF_CHECK_CONFIDENCE, &later);
            // With time windows, there is no interval of the total that was allocated.
            let five_sigma = Interval { low: found.low?, high: found.high? };
            let check = self_check(self.pool.raw_total(value), self.pool.variance(value), five_sigma, counted);
            Some(check).filter(|_| !profile.header.time_windows)
        })
    }
}

/// The groups of processes of a profile, in the order of their first process.
pub(super) fn entries(context: &Context, by: GroupBy) -> Vec<Entry> {
    let profile = context.profile;
    let groups = Groups::new(profile, by);
    let mut entries: IndexMap<(usize, String), Entry> = IndexMap::new();
    // Two processes that had the same pid one after the other are separate.
    let key = |number: usize, name: Cow<str>| (if by.separates_processes() { number } else { 0 }, name.into_owned());
    let new = |(_, name): &(usize, String)| Entry { name: name.clone(), ..Entry::default() };
    for (process, pool) in pools_of_processes(profile).iter().enumerate() {
        let entry = entries.entry(key(process, groups.of_process(process))).or_insert_with_key(new);
        entry.processes.push(process);
        entry.pool.merge(pool);
    }
    for idle in 0..profile.idle.len() {
        let key = key(profile.processes.len() + idle, groups.of_idle(idle));
        entries.entry(key).or_insert_with_key(new).idle.push(idle);
    }
    entries.into_values().collect()
}

/// At most `rows` lines of programs or processes, the largest first, without the exact counts.
pub(super) fn brief(context: &Context, rows: usize) -> Vec<String> {
    with_grouping(context, &|context, by| table(context, by, rows, true))
}

/// Lines of the section; empty if there is only one process and nothing to compare.
pub(super) fn section(context: &Context) -> Vec<String> {
    with_grouping(context, &|context, by| table(context, by, context.options.top.max(MOST), false))
}

fn with_grouping(context: &Context, table: &dyn Fn(&Context, GroupBy) -> Vec<String>) -> Vec<String> {
    let by = match context.group_by {
        GroupBy::Thread => GroupBy::Process,
        GroupBy::Nothing => GroupBy::Program,
        by => by,
    };
    if !by.separates_processes() {
        return table(context, by);
    }
    let apart = programs::by_process(context.profile);
    table(&Context { profile: &apart, ..context.sorted_by(context.sort) }, by)
}

fn table(context: &Context, by: GroupBy, most: usize, brief: bool) -> Vec<String> {
    let profile = context.profile;
    let counted = profile.processes.iter().any(|process| process.exact_alloc_bytes.is_some());
    let entries = entries(context, by);
    if entries.is_empty() || (entries.len() == 1 && !counted) {
        return Vec::new();
    }
    let with_memory = |entry| (super::resident::of(profile, &entry), entry);
    let mut entries: Vec<(Option<Resident>, Entry)> = entries.into_iter().map(with_memory).collect();
    let size = |(resident, entry): &(Option<Resident>, Entry)| match (context.options.sort, resident) {
        (None, Some(resident)) => resident.total_bytes() as f64,
        _ => entry.pool.total(context.sort),
    };
    entries.sort_by(|a, b| size(b).total_cmp(&size(a)));
    let values = [
        profile.header.live.then_some(Value::InuseSpace),
        profile.has_at_exit().then_some(Value::AtExitSpace),
        Some(Value::AllocSpace),
    ];
    let has = |of: fn(&Resident) -> bool| entries.iter().any(|(resident, _)| resident.as_ref().is_some_and(of));
    let memory = [
        has(|_| true).then_some(("RESIDENT", (|it| size_text(it.total_bytes())) as fn(&Resident) -> String)),
        has(|it| it.growth_per_minute.is_some()).then_some(("PER MINUTE", |it| it.growth_text())),
        has(|it| it.not_seen_bytes() > 0).then_some(("NOT SEEN", not_seen_text)),
        has(|it| it.swapped_bytes > 0).then_some(("SWAPPED", |it| size_text(it.swapped_bytes))),
        (by == GroupBy::Cgroup && has(|it| it.cgroup_bytes.is_some()))
            .then_some(("CGROUP'S", |it| size_text(it.cgroup_bytes.unwrap_or(0)))),
    ];
    let growing: Vec<String> = entries.iter().take(most).map(|(_, entry)| entry.growing(context)).collect();
    let grows = growing.iter().any(|growing| !growing.is_empty());
    let mut table = Table::new(columns(by, memory.map(|it| it.map(|(title, _)| title)), values, (grows, brief)));
    for ((resident, entry), growing) in entries.iter().zip(growing) {
        let ended = if entry.has_ended(profile) { " ended" } else { "" };
        // On the first screen, remarks name the processes that are not.
        let inline = if !brief && entry.is_inline(profile) { " inline" } else { "" };
        let name = if brief { context.width / 4 } else { context.width / 3 };
        let mut cells = vec![clip(&entry.name, name) + ended + inline];
        // Of a process that runs, memory was to be read.
        let unread = if ended.is_empty() { "unknown" } else { "" };
        for (_, part) in memory.into_iter().flatten() {
            cells.push(resident.as_ref().map_or_else(|| unread.to_owned(), part));
        }
        for value in values.into_iter().flatten() {
            let figure = entry.figure(context, value);
            cells.extend([figure.figure, figure.bounds]);
            cells.extend((grows && value == Value::InuseSpace).then(|| growing.clone()));
        }
        if !brief && !entry.is_idle() {
            let exact = |value| entry.exact(profile, value).map(|exact| exact as f64);
            cells.push(match (exact(Value::AllocSpace), exact(Value::AllocObjects)) {
                (Some(bytes), Some(calls)) => format!("{} in {} calls", units::bytes(bytes), units::count(calls)),
                (Some(bytes), None) => units::bytes(bytes),
                _ => "not counted".into(),
            });
            let sigmas = entry.checked(context).and_then(|check| check.z);
            cells.push(sigmas.map_or_else(String::new, |sigmas| format!("{sigmas:+.1} σ")));
            cells.push(units::percent(entry.coverage(profile)));
        }
        table.row(cells);
    }
    let title = if entries.len() == 1 { "Estimated and counted" } else { titles(by).0 };
    let (header, rows) = table.lines(context.width, context.options.color);
    let of = || format!(" · top {most} of {}", units::count(entries.len() as f64));
    let mut about = if brief && entries.len() > most { of() } else { String::new() };
    if header.contains(GROWING) {
        about += &format!(" · growing: all memory in use, {}", lately(context));
    }
    let mut lines = vec![context.headed(title, &about), header];
    lines.extend(rows);
    if let Some(more @ 1..) = entries.len().checked_sub(most).filter(|_| !brief) {
        let rest = format!("  and {} more", units::count(more as f64));
        lines.push(context.paint(Style::Dim, &rest));
    }
    lines
}

/// A size, or nothing for none.
fn size_text(bytes: u64) -> String {
    if bytes > 0 { units::bytes(bytes as f64) } else { String::new() }
}

/// Memory in no known heap. It is unknown where memory was not divided into parts.
fn not_seen_text(resident: &Resident) -> String {
    match (resident.not_seen_bytes(), resident.undivided_bytes) {
        (other, 0) => size_text(other),
        (0, _) => "unknown".into(),
        (other, _) => format!("≥ {}", size_text(other)),
    }
}

/// Titles of the table and of its first column.
fn titles(by: GroupBy) -> (&'static str, &'static str) {
    match by {
        GroupBy::Program => ("Programs", "PROGRAM"),
        GroupBy::Comm => ("Process names", "NAME"),
        GroupBy::Exe => ("Executables", "EXECUTABLE"),
        GroupBy::Cgroup => ("cgroups", "CGROUP"),
        GroupBy::Process | GroupBy::Thread | GroupBy::Nothing => ("Processes", "PROCESS"),
    }
}

fn columns(
    by: GroupBy,
    memory: [Option<&'static str>; 5],
    values: [Option<Value>; 3],
    (grows, brief): (bool, bool),
) -> Vec<Column> {
    let mut columns = vec![Column::left(titles(by).1, Style::Name).gap(2)];
    let memory = memory.into_iter().enumerate().filter_map(|(place, title)| Some((place, title?)));
    let ranks = [0, 5, if brief { 4 } else { 1 }, 7, 1];
    // The parts of resident memory come before the figures that it is compared with.
    columns.extend(memory.map(|(place, title)| Column::right(title, Style::Plain).dispensable(ranks[place])));
    for value in values.into_iter().flatten() {
        let (title, rank) = match value {
            Value::InuseSpace => ("IN USE", 3),
            Value::AtExitSpace => ("AT EXIT", 6),
            _ => ("ALLOCATED", 6),
        };
        columns.push(Column::right(title, Style::Bold));
        columns.push(Column::left("", Style::Dim).gap(1).dispensable(rank));
        if grows && value == Value::InuseSpace {
            columns.push(Column::right(GROWING, Style::Plain).dispensable(4));
        }
    }
    if brief {
        return columns;
    }
    columns.push(Column::right("COUNTED EXACTLY", Style::Plain).dispensable(2));
    columns.push(Column::right("DIFFERS BY", Style::Plain).dispensable(3));
    columns.push(Column::right("COUNTED FOR", Style::Plain).dispensable(6));
    columns
}
