//! Estimates from pooled rows.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use smallvec::SmallVec;

use super::loss_bounds::{Kind, LossBounds, Lost, LostOf};
use super::model::{InMemory, LossBound, Profile, Recorded, Row};
use super::value::Value;
use heapbpf_statistics::estimate::{self, Estimate, NO_INTERVAL_KNOWN, NO_OFFSETS, Part};
use heapbpf_statistics::interval::Interval;
use heapbpf_statistics::sums::SampleSums;

/// Reason: the profile was read from a format without samples.
pub const NO_SAMPLES: &str = "read from a format that keeps no samples";
/// Reason for figures of allocation: probes were attached only part of the time.
pub const TIME_WINDOWS: &str = "probes were attached only in time windows: allocations between them are not known";

/// Reason for figures of a process that is idle or has no known allocator.
pub const NOT_COUNTED: &str = "its allocations were not counted";
/// Reason for figures in use: the recording did not follow frees.
pub const NOT_FOLLOWED: &str = "frees were not tracked";
/// Note about a process whose frees were no longer followed.
pub const INUSE_UNKNOWN: &str = "memory in use not known (frees were not followed)";
/// Describes figures in use after following frees was stopped and resumed; a time follows.
pub const INUSE_SINCE: &str = "in use: of blocks since ";
/// Reason for figures in use that exclude the processes whose frees were no longer followed.
pub const SOME_NOT_FOLLOWED: &str = "without the processes whose frees were not tracked";

/// Reason for allocation figures of Go's own heap.
pub const IN_USE_ALONE: &str = "Go's runtime reports only what is in use";

/// Sums of rows by sampling interval, from which their total is estimated.
///
/// A profile has as many pools as stacks. Most pools have one process and one interval; these need no heap memory.
#[derive(Clone, Debug, Default)]
pub struct Pool {
    parts: SmallVec<[PoolPart; 1]>,
    /// Processes of the rows.
    processes: ProcessSet,
    /// Further processes whose rows may all have been lost.
    covered: BTreeSet<usize>,
    /// Whether the location of some blocks in use was not read.
    is_unread: bool,
    /// Whether some rows are mappings (`--mmap`), which lie outside of the heaps of allocators.
    pub(crate) has_mapped: bool,
    /// Samples of allocations whose stack is incomplete.
    incomplete: u64,
    /// Bytes and allocations that the lost samples of these rows stand for.
    lost_bytes: f64,
    lost_objects: f64,
    /// Bounds on lost samples, if they have been computed.
    lost: Option<Arc<LostOf>>,
}

/// Process indices in ascending order. A single one needs no heap memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct ProcessSet {
    first: Option<usize>,
    others: BTreeSet<usize>,
}

impl ProcessSet {
    fn insert(&mut self, process: usize) {
        match self.first {
            Some(first) if first == process => {}
            Some(first) => {
                self.first = Some(first.min(process));
                self.others.insert(first.max(process));
            }
            None => self.first = Some(process),
        }
    }

    /// Adds another set, in time that grows at most with the sizes of both.
    fn merge(&mut self, other: &Self) {
        let Some(first) = other.first else { return };
        self.insert(first);
        if other.others.len() < self.others.len() / 16 {
            other.others.iter().for_each(|process| self.insert(*process));
        } else if !other.others.is_subset(&self.others) {
            self.others = self.others.union(&other.others).copied().collect();
        }
    }

    const fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    fn iter(&self) -> impl Iterator<Item = usize> + Clone + '_ {
        self.first.into_iter().chain(self.others.iter().copied())
    }

    fn contains(&self, process: usize) -> bool {
        self.first == Some(process) || self.others.contains(&process)
    }
}

/// Bounds on lost samples, shared by pools of the same processes.
#[derive(Debug, Default)]
pub(crate) struct SharedLosses {
    known: HashMap<(u64, ProcessSet), Arc<LostOf>>,
    /// The last one used: most stacks belong to the same processes as the stack before.
    last: Option<(u64, ProcessSet, Arc<LostOf>)>,
}

impl SharedLosses {
    /// Gives a complete pool the bounds on its losses.
    pub(crate) fn give_to(&mut self, pool: &mut Pool, profile: &Profile) {
        if !pool.covered.is_empty() {
            return;
        }
        let largest = pool.largest_interval();
        let last = self.last.as_ref().filter(|(of, processes, _)| *of == largest && *processes == pool.processes);
        if let Some((.., lost)) = last {
            return pool.set_lost(Arc::clone(lost));
        }
        let lost = self
            .known
            .entry((largest, pool.processes.clone()))
            .or_insert_with(|| Arc::new(LostOf::new(profile, pool.processes.iter(), largest)));
        let lost = Arc::clone(lost);
        self.last = Some((largest, pool.processes.clone(), Arc::clone(&lost)));
        pool.set_lost(lost);
    }
}

#[derive(Clone, Debug)]
struct PoolPart {
    interval: u64,
    /// Whether Go's runtime took the samples. Then there are only figures in use, and no offsets.
    of_go: bool,
    alloc: SampleSums,
    inuse: SampleSums,
    in_memory: Option<Box<InMemory>>,
    at_exit: SampleSums,
}

impl Pool {
    /// An empty pool for the rows of one process (by its index).
    pub fn of_process(process: usize) -> Self {
        Self { processes: ProcessSet { first: Some(process), ..ProcessSet::default() }, ..Self::default() }
    }

    /// Pools rows.
    pub fn of<'a>(rows: impl IntoIterator<Item = &'a Row>) -> Self {
        let mut pool = Self::default();
        rows.into_iter().for_each(|row| pool.add(row));
        pool
    }

    /// Pools all rows of a profile. Its losses include those of processes without a row.
    pub fn whole(profile: &Profile) -> Self {
        let mut pool = Self::of(&profile.rows);
        pool.cover(0..profile.processes.len());
        pool
    }

    /// Includes the losses of these processes, even if the pool has no rows of them.
    pub fn cover(&mut self, processes: impl IntoIterator<Item = usize>) {
        self.covered.extend(processes);
    }

    /// Sets the losses of all processes to which its rows may belong.
    pub(crate) fn set_lost(&mut self, lost: Arc<LostOf>) {
        self.lost = Some(lost);
    }

    /// Bounds on the effect of lost events on a value.
    ///
    /// # Errors
    ///
    /// The reason why no bound can be given.
    pub(crate) fn losses(&self, profile: &Profile, value: Value) -> Cow<'_, Lost> {
        if let Some(lost) = &self.lost {
            return Cow::Borrowed(lost.of(value));
        }
        let covered = self.covered.iter().copied().filter(|process| !self.processes.contains(*process));
        Cow::Owned(LossBounds::of(profile, self.processes.iter().chain(covered), value, self.largest_interval()))
    }

    /// Largest sampling interval of its rows, in trials.
    fn largest_interval(&self) -> u64 {
        self.parts.iter().filter(|part| !part.of_go).map(|part| part.interval).max().unwrap_or(0)
    }

    /// Whether lost events may have affected a value.
    pub fn is_touched(&self, profile: &Profile, value: Value) -> bool {
        profile.header.samples_known
            && self.losses(profile, value).as_ref().as_ref().map_or(true, |losses| !losses.is_none())
    }

    /// Adds a row.
    pub fn add(&mut self, row: &Row) {
        self.processes.insert(row.key.process);
        if row.key.stack.cut.is_some() {
            self.incomplete = self.incomplete.saturating_add(row.alloc.samples);
        }
        self.has_mapped |= row.is_mapped();
        if row.is_of_lost_samples() {
            self.lost_bytes += row.alloc.bytes;
            self.lost_objects += row.alloc.objects;
        }
        let part = self.part(row.key.interval, row.is_of_go_runtime());
        if !row.is_of_lost_samples() {
            part.alloc.add(&row.alloc);
        }
        part.inuse.add(&row.inuse);
        part.at_exit.add(&row.at_exit);
        match &row.in_memory {
            Some(more) => part.in_memory.get_or_insert_default().add(more),
            None => self.is_unread |= row.inuse.samples > 0,
        }
    }

    /// Adds the rows of another pool. The bounds on lost samples have to be set again.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.processes.merge(&other.processes);
        self.covered.extend(&other.covered);
        self.is_unread |= other.is_unread;
        self.has_mapped |= other.has_mapped;
        self.incomplete = self.incomplete.saturating_add(other.incomplete);
        self.lost_bytes += other.lost_bytes;
        self.lost_objects += other.lost_objects;
        self.lost = None;
        for more in &other.parts {
            let part = self.part(more.interval, more.of_go);
            part.alloc.add(&more.alloc);
            part.inuse.add(&more.inuse);
            part.at_exit.add(&more.at_exit);
            if let Some(more) = &more.in_memory {
                part.in_memory.get_or_insert_default().add(more);
            }
        }
    }

    /// Number of samples of allocations whose stack does not reach the entry of its thread.
    pub const fn incomplete_samples(&self) -> u64 {
        self.incomplete
    }

    /// Their share of all samples of allocations, 0 to 1.
    pub fn incomplete_share(&self) -> f64 {
        self.incomplete as f64 / self.samples(Value::AllocSpace).max(1) as f64
    }

    /// Adds samples in use, given separately from the row.
    pub(crate) fn add_inuse(&mut self, row: &Row, inuse: &SampleSums) {
        self.processes.insert(row.key.process);
        self.part(row.key.interval, row.is_of_go_runtime()).inuse.add(inuse);
    }

    /// The same pool without what Go's runtime sampled: that lies outside of the heaps of allocators.
    #[must_use]
    pub fn without_go(&self) -> Self {
        let mut pool = self.clone();
        pool.parts.retain(|part| !part.of_go);
        pool
    }

    /// What is in use in the heaps of allocators, in the form that such a heap is compared with. `None` if mappings are
    /// pooled with it.
    pub fn recorded(&self, profile: &Profile, confidence: f64) -> Option<Recorded> {
        let pool = self.without_go();
        let estimate = |value| pool.estimate(profile, value, confidence);
        let recorded = || Recorded { bytes: estimate(Value::InuseSpace), blocks: estimate(Value::InuseObjects) };
        (!self.has_mapped).then(recorded)
    }

    /// Allows for allocations that were not sampled under these intervals (in trials). The pool may have allocated
    /// while an interval was in force without getting a sample under it. Stacks sampled by Go's runtime have no other
    /// allocations, so a pool of only such stacks does not change.
    pub fn allow_for(&mut self, intervals: &[u64]) {
        if self.parts.is_empty() || self.parts.iter().any(|part| !part.of_go) {
            self.allow_for_others(intervals);
        }
    }

    /// Like [`Self::allow_for`], but also for pools with only stacks that Go's runtime sampled.
    pub fn allow_for_others(&mut self, intervals: &[u64]) {
        for &interval in intervals.iter().filter(|interval| **interval > 0) {
            self.part(interval, false);
        }
    }

    fn part(&mut self, interval: u64, of_go: bool) -> &mut PoolPart {
        let is_it = |part: &PoolPart| part.interval == interval && part.of_go == of_go;
        let index = self.parts.iter().position(is_it).unwrap_or_else(|| {
            let (alloc, inuse, in_memory, at_exit) = Default::default();
            self.parts.push(PoolPart { interval, of_go, alloc, inuse, in_memory, at_exit });
            self.parts.len() - 1
        });
        &mut self.parts[index]
    }

    /// Estimates a value over all rows, with its interval at the confidence level `confidence` (0 to 1).
    pub fn estimate(&self, profile: &Profile, value: Value, confidence: f64) -> Estimate {
        if !profile.header.samples_known {
            return Estimate { estimate: self.total(value), reason: Some(NO_SAMPLES), ..Estimate::default() };
        }
        if self.has_none(profile, value) {
            return NONE;
        }
        let losses = self.losses(profile, value);
        let of_samples = of_parts(profile, &self.sample_parts(value), &losses, value, confidence);
        Estimate { estimate: of_samples.estimate + self.of_lost_samples(value), ..of_samples }
    }

    /// What the lost samples stand for.
    fn of_lost_samples(&self, value: Value) -> f64 {
        match value {
            Value::AllocSpace => self.lost_bytes,
            Value::AllocObjects => self.lost_objects,
            _ => 0.0,
        }
    }

    /// Whether a value at exit is known to be zero: none of the processes has ended, or what ended processes held
    /// counts as in use.
    fn has_none(&self, profile: &Profile, value: Value) -> bool {
        let may_hold = || {
            profile.header.ended_apart && self.processes.is_empty()
                || self.processes.iter().any(|process| profile.may_hold_at_exit(process))
        };
        value.is_at_exit() && !may_hold() && self.samples(value) == 0 && self.total(value) == 0.0
    }

    /// The unbiased estimate, without corrections, with its interval at `confidence`. It allows for up to `more`
    /// missing samples in addition to those that were lost.
    pub fn raw_estimate(&self, profile: &Profile, value: Value, confidence: f64, more: &LossBound) -> Estimate {
        if self.has_none(profile, value) {
            return NONE;
        }
        let largest = self.largest_interval();
        let losses = self.losses(profile, value).into_owned().map(|mut losses| {
            losses.add_missing(largest.max(profile.header.interval).max(1), more);
            losses
        });
        let of_samples = raw_of_parts(profile, &self.sample_parts(value), &losses, value, confidence);
        Estimate { estimate: of_samples.estimate + self.of_lost_samples(value), ..of_samples }
    }

    /// The interval of the unbiased estimate of bytes, with guaranteed coverage for every mix of sizes.
    ///
    /// # Errors
    ///
    /// The reason why there is no such interval.
    pub fn guaranteed(&self, profile: &Profile, value: Value, confidence: f64) -> Result<Interval, &'static str> {
        if value.is_bytes() && self.has_none(profile, value) {
            return Ok(Interval { low: 0.0, high: 0.0 });
        }
        let of_go = self.parts.iter().filter(|part| part.of_go).count();
        if of_go > 0 && (value.is_inuse() || of_go == self.parts.len()) {
            return Err(NO_OFFSETS);
        }
        guaranteed(profile, &self.sample_parts(value), &self.losses(profile, value), value, confidence)
    }

    fn sample_parts(&self, value: Value) -> SmallVec<[Part<'_>; 2]> {
        let part = |(part, sums): (&PoolPart, _)| {
            let most_bytes = part.in_memory.as_ref().filter(|_| value.is_in_memory()).map_or(0.0, |it| it.most_bytes);
            Part { most_bytes, ..Part::new(part.interval, sums) }
        };
        self.sums_of_parts(value).map(part).collect()
    }

    /// Address space that the mappings in use take, in bytes, with its interval at `confidence`, and the estimate's
    /// variance. `None` if there are no mappings, or if all of each counts as in use.
    pub fn address_space(&self, profile: &Profile, confidence: f64) -> Option<(Estimate, f64)> {
        let own = || self.parts.iter().filter(|part| !part.of_go);
        let parts: SmallVec<[Part<'_>; 2]> = own().map(|part| Part::new(part.interval, reserved_of(part))).collect();
        let variance: f64 = own().map(|part| reserved_of(part).bytes_variance).sum();
        self.has_mappings().then(|| {
            let losses = self.losses(profile, Value::InuseSpace);
            (raw_of_parts(profile, &parts, &losses, Value::InuseSpace, confidence), variance)
        })
    }

    /// Whether there are mappings of which only a part counts as in use.
    fn has_mappings(&self) -> bool {
        self.parts.iter().any(|part| !part.of_go && reserved_of(part).samples > 0)
    }

    /// Whether a value is known. Figures in use and at exit are unknown if frees were followed in none of the
    /// processes.
    pub fn knows(&self, profile: &Profile, value: Value) -> bool {
        if value.is_in_memory() && (self.is_unread || !profile.knows_in_memory()) {
            return false;
        }
        !value.needs_frees()
            || profile.header.live
                && (self.processes.is_empty() || self.processes.iter().any(|it| profile.knows_inuse(it)))
    }

    /// Whether a value is known only for some of the processes, so that it is the total of just those.
    pub fn is_partial(&self, profile: &Profile, value: Value) -> bool {
        value.needs_frees() && self.knows(profile, value) && self.processes.iter().any(|it| !profile.knows_inuse(it))
    }

    /// The point estimate, in bytes or allocations.
    pub fn total(&self, value: Value) -> f64 {
        self.sums(value).map(|(_, sums)| value.estimate_of(sums)).sum::<f64>() + self.of_lost_samples(value)
    }

    /// The unbiased point estimate, without corrections.
    pub fn raw_total(&self, value: Value) -> f64 {
        self.sums(value).map(|(_, sums)| value.raw_estimate_of(sums)).sum::<f64>() + self.of_lost_samples(value)
    }

    /// Unbiased estimate of the variance of [`Self::raw_total`].
    pub fn variance(&self, value: Value) -> f64 {
        let variance = |sums: &SampleSums| if value.is_bytes() { sums.bytes_variance } else { sums.objects_variance };
        // The sum of nothing is −0.
        self.sums(value).map(|(_, sums)| variance(sums)).sum::<f64>() + 0.0
    }

    /// Number of samples behind a value.
    pub fn samples(&self, value: Value) -> u64 {
        self.sums(value).map(|(_, sums)| sums.samples).sum()
    }

    /// Unweighted bytes of the samples behind a value; a lower bound of it.
    pub fn sampled_bytes(&self, value: Value) -> u64 {
        self.sums(value).map(|(_, sums)| sums.sampled_bytes).sum()
    }

    /// The sums behind a value, each with its sampling interval in trials.
    pub fn sums(&self, value: Value) -> impl Iterator<Item = (u64, &SampleSums)> {
        self.sums_of_parts(value).map(|(part, sums)| (part.interval, sums))
    }

    fn sums_of_parts(&self, value: Value) -> impl Iterator<Item = (&PoolPart, &SampleSums)> {
        let is_of = move |part: &&PoolPart| !part.of_go || value.is_inuse() && !value.is_in_memory();
        self.parts.iter().filter(is_of).map(move |part| {
            let sums = match value {
                Value::AllocObjects | Value::AllocSpace => &part.alloc,
                Value::InuseObjects | Value::InuseSpace => &part.inuse,
                Value::AtExitObjects | Value::AtExitSpace => &part.at_exit,
                Value::ResidentSpace | Value::SwappedSpace => {
                    value.part(part.in_memory.as_deref().unwrap_or(&InMemory::NONE))
                }
            };
            (part, sums)
        })
    }
}

fn reserved_of(part: &PoolPart) -> &SampleSums {
    part.in_memory.as_deref().map_or(&SampleSums::NONE, |it| &it.reserved)
}

/// Exactly zero.
const NONE: Estimate = Estimate { estimate: 0.0, low: Some(0.0), high: Some(0.0), exact: None, reason: None };

/// Estimates a value of one row; see [`Pool::estimate`].
pub fn of_row(profile: &Profile, row: &Row, value: Value, confidence: f64) -> Estimate {
    let pool = Pool::of([row]);
    let is_told = !row.is_of_go_runtime() || value.is_inuse() && !value.is_in_memory();
    if profile.header.samples_known && !is_told && !pool.has_none(profile, value) {
        return Estimate { reason: Some(IN_USE_ALONE), ..Estimate::default() };
    }
    pool.estimate(profile, value, confidence)
}

fn guaranteed(
    profile: &Profile,
    parts: &[Part<'_>],
    losses: &Lost,
    value: Value,
    confidence: f64,
) -> Result<Interval, &'static str> {
    match (profile.header.samples_known, value.is_bytes()) {
        (false, _) => Err(NO_SAMPLES),
        _ if profile.header.time_windows && !value.needs_frees() => Err(TIME_WINDOWS),
        (_, false) => Err(NO_INTERVAL_KNOWN),
        _ if !profile.header.offsets_known || value.is_in_memory() => Err(NO_OFFSETS),
        _ => losses
            .as_ref()
            .map_err(|reason| *reason)?
            .widen_guaranteed(parts, |parts| estimate::guaranteed_bytes(parts, profile.header.criterion, confidence)),
    }
}

fn of_parts(profile: &Profile, parts: &[Part<'_>], losses: &Lost, value: Value, confidence: f64) -> Estimate {
    let raw = raw_of_parts(profile, parts, losses, value, confidence);
    let corrections = parts.iter().map(|part| value.estimate_of(part.sums) - value.raw_estimate_of(part.sums));
    let estimate = raw.estimate + corrections.sum::<f64>();
    if profile.header.time_windows && !value.needs_frees() {
        return Estimate { estimate, reason: Some(TIME_WINDOWS), ..Estimate::default() };
    }
    Estimate { estimate, ..raw }
}

fn raw_of_parts(profile: &Profile, parts: &[Part<'_>], losses: &Lost, value: Value, confidence: f64) -> Estimate {
    let of = match value {
        _ if value.is_in_memory() => estimate::parts_of_blocks,
        _ if value.is_bytes() => estimate::bytes,
        _ => estimate::objects,
    };
    let criterion = profile.header.criterion;
    match losses {
        Ok(losses) => {
            losses.widen(parts, Kind::of(profile, value), confidence, |parts| of(parts, criterion, confidence))
        }
        Err(reason) => Estimate { low: None, high: None, reason: Some(*reason), ..of(parts, criterion, confidence) },
    }
}

/// Rows whose samples heapbpf drew.
fn own(rows: &[Row]) -> impl Iterator<Item = &Row> {
    rows.iter().filter(|row| !row.is_of_go_runtime())
}

/// Sampling intervals of heapbpf that are known to have been in force, from the samples and the header; in trials,
/// ascending.
pub fn intervals_used(profile: &Profile) -> Vec<u64> {
    let (mut used, mut last) = (profile.header.intervals().collect::<BTreeSet<u64>>(), profile.header.interval);
    // Most rows have the same interval as the previous row.
    for row in own(&profile.rows).filter(|row| row.key.interval != std::mem::replace(&mut last, row.key.interval)) {
        used.insert(row.key.interval);
    }
    used.into_iter().collect()
}

/// Coverage of a process that was hooked throughout, allowing for rounding.
const HOOKED_THROUGHOUT: f64 = 1.0 - 1e-9;

/// The exact count of a value, for one process (by its index) or for all. `None` if part of it was not counted. If
/// probes were in place only in time windows, that applies to every process that was not hooked throughout.
pub fn exact(profile: &Profile, process: Option<usize>, value: Value) -> Option<u64> {
    let processes = match process {
        Some(index) => profile.processes.get(index..=index)?,
        None => &profile.processes[..],
    };
    let of = |process: &super::model::Process| match value {
        _ if profile.header.time_windows && process.coverage < HOOKED_THROUGHOUT => None,
        Value::AllocSpace => process.exact_alloc_bytes,
        Value::AllocObjects => process.exact_alloc_objects,
        _ => None,
    };
    if value.needs_frees()
        // Without processes, either nothing was counted or the format does not store processes.
        || processes.is_empty() && !(profile.rows.is_empty() && profile.header.samples_known)
    {
        return None;
    }
    processes.iter().try_fold(0u64, |sum, process| sum.checked_add(of(process)?))
}

#[cfg(test)]
#[path = "estimates_tests.rs"]
mod tests;
