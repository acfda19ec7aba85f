//! The web page: one file with all its code (`web/`), and the data that it shows.

mod calls;
mod figures;
mod growth;
mod kept;

use std::collections::HashMap;
use std::sync::Arc;

use serde::Serialize;

use self::calls::{Chain, Frames, Functions, Names, Stacks};
use self::figures::Column;
pub use self::figures::Figure;
pub use self::growth::{GrowthData, growth_data};
pub use self::kept::{KeptData, kept_data};
use crate::escape::escaped_json;
use crate::estimates::{Pool, exact, intervals_used};
use crate::group::{GroupBy, Groups};
use crate::intern::Interned;
use crate::model::{Lifetimes, Profile};
use crate::report::{ReportOptions, ResidentText, remarks, resident_texts, subject};
use crate::units;
use crate::value::Value;
use heapbpf_statistics::survival;

/// The page, with a place for its data. Made by `cargo xtask web`.
pub const PAGE: &str = include_str!("../../../../web/dist/page.html");
/// The place. In a page that gets its data from a server, nothing is there.
const PLACE: &str = "@DATA@";

/// Most processes that are listed one by one.
const MOST_PROCESSES: usize = 500;
/// Most stacks with a lifetime curve.
const MOST_CURVES: usize = 2_000;
/// Most stacks; the smallest are left out beyond that.
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
    /// The value to show first.
    active: usize,
    /// A figure for each value.
    totals: Vec<Figure>,
    groups: Vec<Group>,
    processes: Vec<ProcessEntry>,
    remarks: Vec<String>,
    counters: std::collections::BTreeMap<String, u64>,
    /// Stacks that are not here, because they are too many.
    left_out: usize,
    strings: Vec<String>,
    functions: Functions,
    frames: Frames,
    stacks: Stacks,
    /// A column for each value.
    columns: Vec<Column>,
    sizes: Sizes,
    lifetimes: Vec<Option<StackLifetimes>>,
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
    resident: Option<ResidentEntry>,
}

/// Where the resident memory of a program or process is.
#[derive(Serialize)]
struct ResidentEntry {
    bytes: u64,
    parts: String,
    heap: String,
}

impl From<ResidentText> for ResidentEntry {
    fn from(ResidentText { bytes, parts, heap, .. }: ResidentText) -> Self {
        Self { bytes, parts, heap }
    }
}

#[derive(Serialize)]
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
    resident: Option<ResidentEntry>,
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
    /// Seconds and the share that lives longer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    curve: Vec<(f64, f64)>,
}

/// Rows of equal group and frames.
struct Stack<'a> {
    pool: Pool,
    lifetimes: Vec<(&'a Lifetimes, f64)>,
}

/// The page over one profile, without a server.
///
/// # Errors
/// The data cannot be encoded.
pub fn static_page(data: &PageData, report: &str) -> serde_json::Result<String> {
    #[derive(Serialize)]
    struct Static<'a> {
        profile: &'a PageData,
        report: &'a str,
    }
    let data = serde_json::to_string(&Static { profile: data, report })?;
    let (before, after) = PAGE.split_once(PLACE).unwrap_or((PAGE, ""));
    // A name with "</script>" in it must not end the data.
    Ok([before, &escaped_json(&data.replace('<', "\\u003c")), after].concat())
}

/// The page of a server, which asks for its data.
pub fn served_page() -> String {
    PAGE.replacen(PLACE, "", 1)
}

/// The page's policy: only its own code runs, and it talks to nobody but its own server.
pub fn served_policy() -> &'static str {
    let begin = "Content-Security-Policy\" content=\"";
    PAGE.split_once(begin).and_then(|(_, rest)| rest.split_once('"')).map_or("default-src 'none'", |(policy, _)| policy)
}

/// Makes the data of a page.
pub fn page_data(profile: &Profile, shown: Value, group_by: Option<GroupBy>, confidence: f64) -> PageData {
    let values = Value::shown_of(profile);
    let by = group_by.unwrap_or(GroupBy::Program);
    let mut names = Names::new();
    let mut groups = GroupNames::new(profile, by);
    let (mut chains, mut stacks) = grouped(profile, &mut names, &mut groups);
    let left_out = largest_only(&mut chains, &mut stacks, shown);
    let (columns, order) = Stacks::new(&names, &chains, &groups.comparable);
    let intervals = intervals_used(profile);
    stacks.iter_mut().for_each(|stack| stack.pool.allow_for(&intervals));
    let pools: Vec<&Pool> = order.iter().map(|&index| &stacks[index].pool).collect();
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
        groups: groups.figures(profile, values, confidence, &intervals, resident_of_groups(profile, by, confidence)),
        processes: processes(profile, by, shown, values, confidence),
        remarks: remarks(profile, &ReportOptions { group_by: Some(by), confidence, ..ReportOptions::default() }),
        counters: profile.counters.clone(),
        left_out,
        columns: values.iter().map(|&value| Column::of(profile, &pools, value, confidence)).collect(),
        sizes: Sizes::of(&pools),
        lifetimes: lifetimes(&stacks, &order, shown),
        strings: names.strings,
        functions: names.functions,
        frames: names.frames,
        stacks: columns,
    }
}

/// Figures in use and allocated of the processes (by their indices) that are `seen`, for a timeline.
pub fn totals(profile: &Profile, confidence: f64, seen: impl Fn(usize) -> bool) -> [Figure; 2] {
    let processes = || (0..profile.processes.len()).filter(|index| seen(*index));
    let mut pool = Pool::of(profile.rows.iter().filter(|row| seen(row.key.process)));
    pool.cover(processes());
    [Value::InuseSpace, Value::AllocSpace].map(|value| {
        let mut counted = processes().map(|it| exact(profile, Some(it), value));
        let exact = counted.try_fold(0u64, |sum, it| sum.checked_add(it?));
        Figure::of(profile, &pool, value, confidence, exact)
    })
}

fn figures(profile: &Profile, pool: &Pool, values: &[Value], confidence: f64, process: Option<usize>) -> Vec<Figure> {
    let figure = |&value: &Value| Figure::of(profile, pool, value, confidence, exact(profile, process, value));
    values.iter().map(figure).collect()
}

/// Names of groups, in the order in which their stacks come.
struct GroupNames<'a> {
    shown: Groups<'a>,
    same: Groups<'a>,
    names: Vec<String>,
    /// Names that are the same in another recording.
    comparable: Vec<String>,
    by_name: HashMap<String, u32>,
    rows: Vec<Pool>,
    processes: Vec<std::collections::BTreeSet<usize>>,
}

impl<'a> GroupNames<'a> {
    fn new(profile: &'a Profile, by: GroupBy) -> Self {
        Self {
            shown: Groups::new(profile, by),
            same: Groups::comparable(profile, by),
            names: Vec::new(),
            comparable: Vec::new(),
            by_name: HashMap::new(),
            rows: Vec::new(),
            processes: Vec::new(),
        }
    }

    fn add(&mut self, row: &'a crate::model::Row) -> u32 {
        let name = self.shown.name(row);
        let id = match self.by_name.get(&*name) {
            Some(&id) => id,
            None => {
                let id = self.names.len() as u32;
                self.names.push(name.to_string());
                self.comparable.push(self.same.name(row).into_owned());
                self.by_name.insert(name.into_owned(), id);
                self.rows.push(Pool::default());
                self.processes.push(std::collections::BTreeSet::new());
                id
            }
        };
        self.rows[id as usize].add(row);
        self.processes[id as usize].insert(row.key.process);
        id
    }

    fn figures(
        &mut self,
        profile: &Profile,
        values: &[Value],
        confidence: f64,
        intervals: &[u64],
        mut resident: HashMap<String, ResidentEntry>,
    ) -> Vec<Group> {
        let groups = self.names.iter().zip(&mut self.rows).zip(&self.processes);
        groups
            .map(|((name, pool), processes)| {
                pool.allow_for(intervals);
                let exact_of = |value| {
                    processes
                        .iter()
                        .map(|&it| exact(profile, Some(it), value))
                        .try_fold(0u64, |sum, it| sum.checked_add(it?))
                };
                let totals = values.iter().map(|&it| Figure::of(profile, pool, it, confidence, exact_of(it))).collect();
                let count = processes.iter().filter_map(|&it| profile.processes.get(it)).map(|it| it.count()).sum();
                Group { name: name.clone(), processes: count, totals, resident: resident.remove(name) }
            })
            .collect()
    }
}

/// Where the memory of each group is, by its name. Threads have none of their own.
fn resident_of_groups(profile: &Profile, by: GroupBy, confidence: f64) -> HashMap<String, ResidentEntry> {
    if by == GroupBy::Thread {
        return HashMap::new();
    }
    resident_texts(profile, by, confidence)
        .into_iter()
        .map(|mut it| (std::mem::take(&mut it.name), it.into()))
        .collect()
}

/// Rows of equal group and frames, as one stack.
fn grouped<'a>(profile: &'a Profile, names: &mut Names, groups: &mut GroupNames<'a>) -> (Vec<Chain>, Vec<Stack<'a>>) {
    let interned = Interned::for_viewers(profile);
    let ids: Vec<u32> = interned.frames.iter().map(|frame| names.frame(profile, frame)).collect();
    let frames_of: Vec<Arc<[u32]>> = (0..interned.stacks.len() as u32)
        .map(|stack| interned.frame_ids(stack).iter().rev().map(|&frame| ids[frame as usize]).collect())
        .collect();
    let mut known: HashMap<Chain, usize> = HashMap::new();
    let (mut chains, mut stacks): (Vec<Chain>, Vec<Stack<'a>>) = Default::default();
    for (row, &stack) in profile.rows.iter().zip(&interned.stack_of_row) {
        let cut = row.key.stack.cut.as_deref().map_or(0, |reason| names.text(reason));
        let chain = Chain { group: groups.add(row), cut, frames: Arc::clone(&frames_of[stack as usize]) };
        let index = *known.entry(chain).or_insert_with_key(|chain| {
            chains.push(chain.clone());
            stacks.push(Stack { pool: Pool::default(), lifetimes: Vec::new() });
            stacks.len() - 1
        });
        stacks[index].pool.add(row);
        stacks[index].lifetimes.extend(row.lifetimes.as_ref().map(|it| (it, row.alloc.objects)));
    }
    (chains, stacks)
}

/// Drops the smallest stacks beyond [`MOST_STACKS`]. Returns how many.
fn largest_only(chains: &mut Vec<Chain>, stacks: &mut Vec<Stack>, by: Value) -> usize {
    let left_out = stacks.len().saturating_sub(MOST_STACKS);
    if left_out > 0 {
        let size = |stack: &Stack| (stack.pool.total(by), stack.pool.total(Value::AllocSpace));
        let mut order: Vec<usize> = (0..stacks.len()).collect();
        order.sort_by(|&a, &b| {
            let (a, b) = (size(&stacks[a]), size(&stacks[b]));
            b.0.total_cmp(&a.0).then(b.1.total_cmp(&a.1))
        });
        let mut kept = vec![false; stacks.len()];
        order[..MOST_STACKS].iter().for_each(|&index| kept[index] = true);
        let (mut of_chains, mut of_stacks) = (kept.iter(), kept.iter());
        chains.retain(|_| of_chains.next() == Some(&true));
        stacks.retain(|_| of_stacks.next() == Some(&true));
    }
    left_out
}

/// The largest processes.
fn processes(profile: &Profile, by: GroupBy, sort: Value, values: &[Value], confidence: f64) -> Vec<ProcessEntry> {
    let groups = Groups::new(profile, by);
    let mut pools: Vec<Pool> = (0..profile.processes.len()).map(Pool::of_process).collect();
    for row in &profile.rows {
        if let Some(pool) = pools.get_mut(row.key.process) {
            pool.add(row);
        }
    }
    let intervals = intervals_used(profile);
    let mut order: Vec<usize> = (0..pools.len()).collect();
    order.sort_by(|&a, &b| pools[b].total(sort).total_cmp(&pools[a].total(sort)));
    order.truncate(MOST_PROCESSES);
    let resident = resident_texts(profile, GroupBy::Process, confidence);
    let mut resident: HashMap<usize, ResidentEntry> =
        resident.into_iter().filter_map(|it| Some((*it.processes.first()?, it.into()))).collect();
    let entry = |index: usize| {
        let process = &profile.processes[index];
        let pool = &mut pools[index];
        pool.allow_for(&intervals);
        pool.cover([index]);
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
            totals: figures(profile, pool, values, confidence, Some(index)),
            resident: resident.remove(&index),
        }
    };
    order.into_iter().map(entry).collect()
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

/// Lifetimes of each stack; the largest have their curves.
fn lifetimes(stacks: &[Stack], order: &[usize], by: Value) -> Vec<Option<StackLifetimes>> {
    let mut sizes: Vec<f64> = stacks.iter().map(|stack| stack.pool.total(by)).collect();
    sizes.sort_by(|a, b| b.total_cmp(a));
    let least = sizes.get(MOST_CURVES).copied().unwrap_or(f64::NEG_INFINITY);
    let one = |&index: &usize| {
        let Lifetimes { median_seconds, temporary, survival, .. } = survival::pooled(&stacks[index].lifetimes)?;
        let curve = if stacks[index].pool.total(by) > least { survival } else { Vec::new() };
        Some(StackLifetimes { median: median_seconds, temporary, curve })
    };
    order.iter().map(one).collect()
}

#[cfg(test)]
mod tests;
