//! The sampled heap: sums per stack, and the sampled blocks that are live. No I/O: events in, sums out.

mod births;
mod growth;
#[cfg(test)]
mod leak_tests;
mod mappings;
#[cfg(test)]
mod model_tests;
mod overflow;
mod reconciliation;
mod row;
#[cfg(test)]
mod tests;
mod untracked;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use heapbpf_statistics::growth::Growth;
use heapbpf_statistics::sums::SampleSums;
use heapbpf_statistics::weight::{Inclusion, inclusion};
use heapbpf_unwind::raw::RawStack;
use sampler_ebpf::abi::ProcessKey;
use sampler_ebpf::trials::{SIZE_CLASSES, size_class};
use slab::Slab;

pub use self::births::SumsByMark;
use self::growth::Marks;
use self::overflow::Overflow;
use self::reconciliation::Reconciliation;
pub use self::reconciliation::{AfterCut, LostRecords};
pub use self::row::HeapRow;
use self::untracked::Untracked;
pub use self::untracked::UntrackedBlock;
use super::ages::Ages;
use super::mapped::MappedPieces;
use super::sample::{Sample, SampleKey};

/// Weight of a sample; 0 without trials or an interval, which no real sample lacks.
fn weight_of(trials: u64, interval: u64) -> f64 {
    inclusion(trials, interval).map_or(0.0, |inclusion| inclusion.weight)
}

/// Smallest page size; all others are multiples of it.
const PAGE: u64 = 4096;

/// The total in use must exceed the last recorded peak by this factor to be recorded as a new one.
const PEAK_STEP: f64 = 1.02;

/// A sampled block that is live.
#[derive(Clone, Copy, Debug)]
struct LiveSample {
    address: u64,
    size_bytes: u64,
    trials: u64,
    offset: u64,
    time_ns: u64,
    /// When it last lost a part, if it is a mapping; otherwise 0 (CLOCK_MONOTONIC).
    shrunk_ns: u64,
    row: u32,
    mapped: bool,
    /// The last scan of the kernel's live map that found it, or [`reconciliation::DURING_SCAN`].
    seen_in_scan: u8,
}

/// The sampled heaps of all processes.
#[derive(Default)]
pub struct Heap {
    rows: Slab<HeapRow>,
    index: HashMap<SampleKey, u32>,
    spaces: HashMap<ProcessKey, HashMap<u64, LiveSample>>,
    mappings: HashMap<ProcessKey, MappedPieces>,
    totals: Estimated,
    by_class: ClassCounts,
    /// Bytes in use at the last recorded peak.
    peak_bytes: f64,
    /// Whether blocks were allocated since the total in use last fell, or the peak was lowered: the total may be a new
    /// peak.
    rising: bool,
    /// Whether blocks that were live when their process ended are reported separately from those in use.
    ended_apart: bool,
    marks: Marks,
    overflow: Overflow,
    untracked: Untracked,
    reconciliation: Reconciliation,
}

/// Estimated allocations by size class.
struct ClassCounts([f64; SIZE_CLASSES]);

impl Default for ClassCounts {
    fn default() -> Self {
        Self([0.0; SIZE_CLASSES])
    }
}

/// Running estimates for the status line. Rounding errors accumulate in them; snapshots are exact sums.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimated {
    /// Samples seen.
    pub samples: u64,
    /// Sampled blocks that are live.
    pub live_samples: u64,
    /// Bytes allocated.
    pub alloc_bytes: f64,
    /// Bytes in use.
    pub inuse_bytes: f64,
}

/// A row and its sums in use.
pub struct RowSnapshot<'a> {
    /// Number of the row, as in [`Heap::inuse_by_mark`].
    pub number: usize,
    /// The row.
    pub row: &'a HeapRow,
    /// In use now. Includes the blocks that were live when their process ended, unless they are reported separately.
    pub inuse: SampleSums,
    /// Live when their process ended, if reported separately.
    pub at_exit: SampleSums,
    /// In use at the peak.
    pub peak: SampleSums,
    /// If requested: ages of freed blocks, of those in use now, and of those in use when their process ended.
    pub ages: Option<Ages>,
    /// How it grew since [`Heap::growth_since`].
    pub growth: Option<Growth>,
}

/// A sampled block in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveBlock {
    /// Number of its row, as in [`RowSnapshot::number`].
    pub row: usize,
    /// Its address.
    pub address: u64,
    /// Bytes requested.
    pub size_bytes: u64,
    /// Its trials.
    pub trials: u64,
    /// If it is a piece of a mapping: the sample, which its other pieces share.
    pub mapping: Option<u64>,
}

/// Sums of the live blocks, by row number; the last two only if requested.
struct LiveSums {
    inuse: Vec<SampleSums>,
    kept: Option<Vec<SampleSums>>,
    ages: Option<Vec<Ages>>,
}

impl Heap {
    /// Creates an empty heap. With `ended_apart`, blocks that are live when their process ends are reported separately
    /// from those in use, which suits a whole host. Without it they stay in use, as the last state of the process.
    pub fn new(ended_apart: bool) -> Self {
        Self { ended_apart, ..Self::default() }
    }

    /// Adds a sampled allocation.
    pub fn allocate(&mut self, sample: Sample) {
        self.marks.note(sample.time_ns);
        let row_number = self.row_of(&sample);
        let row = &mut self.rows[row_number as usize];
        row.alloc.record(sample.size_bytes, sample.trials, sample.offset, sample.key.interval);
        let weight = weight_of(sample.trials, sample.key.interval);
        let bytes = sample.size_bytes as f64 * weight;
        self.by_class.0[size_class(sample.size_bytes)] += weight;
        self.totals.samples += 1;
        self.totals.alloc_bytes += bytes;
        if !sample.tracked || self.untracked.note_block(&sample) {
            row.untracked += 1;
            return;
        }
        if sample.mapped {
            let end = sample.address.saturating_add(sample.size_bytes);
            // The kernel maps whole pages and replaces what was mapped there before.
            self.unmap(sample.space, sample.address, end.checked_next_multiple_of(PAGE).unwrap_or(end), sample.time_ns);
            let pieces = self.mappings.entry(sample.space).or_default();
            pieces.map(sample.address, end, sample.id, sample.time_ns);
        }
        let live = LiveSample {
            address: sample.address,
            size_bytes: sample.size_bytes,
            trials: sample.trials,
            offset: sample.offset,
            time_ns: sample.time_ns,
            shrunk_ns: 0,
            row: row_number,
            mapped: sample.mapped,
            seen_in_scan: self.reconciliation.mark_of_new_block(),
        };
        self.add_live(sample.space, sample.id, live);
    }

    fn add_live(&mut self, space: ProcessKey, id: u64, live: LiveSample) {
        let row = &mut self.rows[live.row as usize];
        row.live += 1;
        self.totals.inuse_bytes += live.size_bytes as f64 * weight_of(live.trials, row.key.interval);
        self.totals.live_samples += 1;
        self.rising = true;
        self.spaces.entry(space).or_default().insert(id, live);
    }

    fn row_of(&mut self, sample: &Sample) -> u32 {
        if let Some(number) = self.index.get(&sample.key) {
            return *number;
        }
        self.merge_coldest_rows();
        self.row_with(sample.key.clone(), sample.time_ns, sample.mapped)
    }

    /// Returns the number of the row with this key. Adds the row, with its first sample at `first_ns`, if there is
    /// none. `mapped`: its samples are mappings.
    fn row_with(&mut self, key: SampleKey, first_ns: u64, mapped: bool) -> u32 {
        let rows = &mut self.rows;
        let add = |key: &SampleKey| rows.insert(HeapRow::new(key.clone(), first_ns, mapped)) as u32;
        *self.index.entry(key).or_insert_with_key(add)
    }

    /// Removes a sampled block that was freed. Ignores unknown blocks, such as one whose free has been counted already.
    pub fn free(&mut self, space: ProcessKey, id: u64, time_ns: u64, temporary: bool) {
        self.note_peak();
        let Some(live) = self.spaces.get_mut(&space).and_then(|samples| samples.remove(&id)) else { return };
        self.marks.note(time_ns);
        self.note_freed(&live, time_ns);
        let weight = self.subtract_live(&live);
        self.rows[live.row as usize].ages.record(live.time_ns, time_ns, weight, temporary);
    }

    /// Interval of a live block's row.
    fn interval_of(&self, live: &LiveSample) -> u64 {
        self.rows[live.row as usize].key.interval
    }

    /// Subtracts a block from the running totals, and returns its weight.
    fn subtract_live(&mut self, live: &LiveSample) -> f64 {
        let row = &mut self.rows[live.row as usize];
        row.live -= 1;
        let weight = weight_of(live.trials, row.key.interval);
        self.totals.inuse_bytes -= live.size_bytes as f64 * weight;
        self.totals.live_samples -= 1;
        weight
    }

    /// Records the end of a process at `at_ns` (CLOCK_MONOTONIC): the live blocks of its address space become blocks at
    /// exit. `was_live` removes a block from the kernel's live map by its address, and returns whether it was there. A
    /// block that was not there had been freed, and the record of its free was lost. Returns the number of such blocks.
    pub fn end(&mut self, space: ProcessKey, at_ns: u64, mut was_live: impl FnMut(u64) -> bool) -> u64 {
        self.note_peak();
        self.mappings.remove(&space);
        let mut lost_frees = 0;
        for live in self.spaces.remove(&space).unwrap_or_default().values() {
            let weight = self.subtract_live(live);
            // The kernel's live map does not contain mappings.
            let was_freed = !live.mapped && !was_live(live.address);
            if was_freed || self.ended_apart {
                self.note_freed(live, at_ns);
            } else {
                self.note_left(live);
            }
            if was_freed {
                lost_frees += 1;
            } else {
                let row = &mut self.rows[live.row as usize];
                row.at_exit.record(live.size_bytes, live.trials, live.offset, row.key.interval);
                row.ages.record_left(live.time_ns, at_ns, row.ages.last_free_ns(), weight);
            }
        }
        lost_frees
    }

    /// Removes all blocks of an address space whose process executed a new program at `at_ns` (CLOCK_MONOTONIC).
    /// Returns their addresses.
    pub fn replace(&mut self, space: ProcessKey, at_ns: u64) -> Vec<u64> {
        self.note_peak();
        self.mappings.remove(&space);
        let samples = self.spaces.remove(&space).unwrap_or_default();
        for live in samples.values() {
            self.note_freed(live, at_ns);
            let weight = self.subtract_live(live);
            let ages = &mut self.rows[live.row as usize].ages;
            ages.record_left(live.time_ns, at_ns, ages.last_free_ns(), weight);
        }
        samples.into_values().map(|live| live.address).collect()
    }

    /// Records a peak if the total in use is high enough. Called before the total falls.
    fn note_peak(&mut self) {
        if self.is_peak() {
            let sums = self.sum_live(None, None).inuse;
            self.record_peak(&sums);
        }
    }

    /// Whether the total in use is a new peak, which the caller must then record.
    fn is_peak(&mut self) -> bool {
        let is_peak = self.rising && self.totals.inuse_bytes >= self.peak_bytes * PEAK_STEP;
        self.rising = false;
        if is_peak {
            self.peak_bytes = self.totals.inuse_bytes;
        }
        is_peak
    }

    /// Lowers the peak to that of the remaining figures. It stays at the same moment: sums of other moments are not
    /// kept.
    fn lower_peak(&mut self) {
        self.peak_bytes = self.rows.iter().map(|(_, row)| row.peak.bytes).sum();
        self.rising = true;
    }

    fn record_peak(&mut self, sums: &[SampleSums]) {
        for (number, row) in &mut self.rows {
            row.peak = sums[number];
        }
    }

    /// Returns sums of the live blocks, by row number: of all blocks, of those allocated after `since_ns`, and the ages
    /// at `ages_at_ns` (CLOCK_MONOTONIC).
    fn sum_live(&self, since_ns: Option<u64>, ages_at_ns: Option<u64>) -> LiveSums {
        let rows = self.rows.capacity();
        let mut sums = LiveSums {
            inuse: vec![SampleSums::default(); rows],
            kept: since_ns.map(|_| vec![SampleSums::default(); rows]),
            ages: ages_at_ns.map(|_| vec![Ages::default(); rows]),
        };
        // Most stacks allocate blocks of a single size, so the last weight of each row is cached.
        let mut known: Vec<Option<(u64, Inclusion)>> = vec![None; rows];
        for live in self.spaces.values().flat_map(HashMap::values) {
            let number = live.row as usize;
            if known[number].is_none_or(|(trials, _)| trials != live.trials) {
                known[number] = inclusion(live.trials, self.rows[number].key.interval).map(|it| (live.trials, it));
            }
            let inclusion = known[number].as_ref().map(|(_, inclusion)| inclusion);
            if let Some(inclusion) = inclusion {
                sums.inuse[number].record_included(live.size_bytes, live.offset, inclusion);
            }
            if let (Some(kept), Some(inclusion)) = (&mut sums.kept, inclusion)
                && since_ns.is_some_and(|since_ns| live.time_ns > since_ns)
            {
                kept[number].record_included(live.size_bytes, live.offset, inclusion);
            }
            if let (Some(ages), Some(now_ns)) = (&mut sums.ages, ages_at_ns) {
                let last_free_ns = self.rows[number].ages.last_free_ns();
                ages[number].record_left(live.time_ns, now_ns, last_free_ns, inclusion.map_or(0.0, |it| it.weight));
            }
        }
        sums
    }

    /// Estimated allocations so far, by size class.
    pub const fn by_class(&self) -> &[f64; SIZE_CLASSES] {
        &self.by_class.0
    }

    /// Running estimates.
    pub const fn estimated(&self) -> Estimated {
        self.totals
    }

    /// Returns every row with its sums in use at `now_ns` (CLOCK_MONOTONIC). They are computed from the live blocks, so
    /// rounding errors do not accumulate. `ages`: whether to include the ages of blocks.
    pub fn snapshot(&mut self, now_ns: u64, ages: bool) -> impl Iterator<Item = RowSnapshot<'_>> {
        let since_ns = self.marks.since(now_ns);
        let LiveSums { inuse, kept, mut ages } = self.sum_live(since_ns, ages.then_some(now_ns));
        if self.is_peak() {
            self.record_peak(&inuse);
        }
        let apart = self.ended_apart;
        self.rows.iter().map(move |(number, row)| {
            let (mut inuse, mut at_exit) = (inuse[number], SampleSums::default());
            if apart { &mut at_exit } else { &mut inuse }.add(&row.at_exit);
            let mut ages = ages.as_mut().map(|living| std::mem::take(&mut living[number]));
            ages.iter_mut().for_each(|ages| ages.add(&row.ages));
            let growth = since_ns.zip(kept.as_ref()).map(|(since_ns, kept)| {
                let mut growth = row.curve.since(since_ns);
                growth.kept.add(&kept[number]);
                growth
            });
            RowSnapshot { number, row, inuse, at_exit, peak: row.peak, ages, growth }
        })
    }

    /// Number of sampled blocks in use in an address space.
    pub fn live_blocks(&self, space: &ProcessKey) -> usize {
        self.spaces.get(space).map_or(0, HashMap::len)
    }

    /// Returns the sampled blocks in use in an address space: all mappings, each remaining piece as a block of its own,
    /// and the other blocks, or only those among `most` samples that are chosen at random. Their order is that of a
    /// hash table with a random hash of their ids.
    pub fn blocks(&self, space: &ProcessKey, most: usize) -> Vec<LiveBlock> {
        let Some(samples) = self.spaces.get(space) else { return Vec::new() };
        let block = |live: &LiveSample, address, size_bytes, mapping| LiveBlock {
            row: live.row as usize,
            address,
            size_bytes,
            trials: live.trials,
            mapping,
        };
        let chosen = samples.values().take(most).filter(|live| !live.mapped);
        let mut blocks: Vec<LiveBlock> = chosen.map(|live| block(live, live.address, live.size_bytes, None)).collect();
        let pieces = self.mappings.get(space).into_iter().flat_map(MappedPieces::pieces);
        let piece = |(start, bytes, id): (u64, u64, u64)| Some(block(samples.get(&id)?, start, bytes, Some(id)));
        blocks.extend(pieces.filter_map(piece));
        blocks
    }

    /// Records that a snapshot has taken the stacks of all rows to be symbolized.
    pub fn mark_named(&mut self) {
        for (_, row) in &mut self.rows {
            row.named = true;
        }
    }

    /// Removes the rows of ended processes. Rows with blocks that are live in another address space (the parent's, for
    /// a vfork child) stay for a later call. Returns the removed rows, and the processes that still have rows.
    pub fn retire(&mut self, ended: &HashSet<ProcessKey>) -> (Vec<HeapRow>, HashSet<ProcessKey>) {
        let of_ended = self.rows.iter().filter(|(_, row)| ended.contains(&row.key.process));
        let (done, held): (Vec<_>, Vec<_>) = of_ended.partition(|(_, row)| row.live == 0);
        let held = held.into_iter().map(|(_, row)| row.key.process).collect();
        let done: Vec<usize> = done.into_iter().map(|(number, _)| number).collect();
        let retired = done.into_iter().map(|number| {
            let row = self.rows.remove(number);
            self.index.remove(&row.key);
            row
        });
        let retired: Vec<HeapRow> = retired.collect();
        if retired.iter().any(|row| row.peak.bytes > 0.0) {
            self.lower_peak();
        }
        (retired, held)
    }

    /// Stacks of all rows.
    pub fn stacks(&self) -> impl Iterator<Item = (ProcessKey, &Arc<RawStack>)> {
        self.rows.iter().map(|(_, row)| (row.key.process, &*row.key.stack))
    }
}
