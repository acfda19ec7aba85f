//! The heap as known from samples: sums per stack, and the sampled blocks that live. Pure: events in, sums out.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use sampler_ebpf::abi::ProcessKey;
use sampler_ebpf::trials::{SIZE_CLASSES, size_class};
use slab::Slab;

use self::cold::Cold;
use self::left::Left;
use self::reconciliation::Reconciliation;
pub use self::reconciliation::{Afterwards, Found, LostBlocks};
pub use self::row::HeapRow;
use self::row::RowKey;
use super::mapped::MappedPieces;
use super::sums::SampleSums;
use super::windows::{Correction, Weights, Windows};
use crate::sampling::weight::{Inclusion, inclusion};
use crate::unwind::raw::RawStack;

/// Weight of a sample; one of no trials or without an interval cannot exist and weighs nothing.
fn weight_of(trials: u64, interval: u64) -> f64 {
    inclusion(trials, interval).map_or(0.0, |inclusion| inclusion.weight)
}

/// Pages are of this size or a multiple of it.
const PAGE: u64 = 4096;

/// Growth of the total in use at which a new peak is worth remembering.
const PEAK_STEP: f64 = 1.02;

/// A sampled allocation, decoded and with its stack.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Unique in the recording.
    pub id: u64,
    /// Who allocated.
    pub process: ProcessKey,
    /// Whose address space the block is in.
    pub space: ProcessKey,
    /// CLOCK_MONOTONIC.
    pub time_ns: u64,
    /// Where the block is.
    pub address: u64,
    /// Bytes requested.
    pub size_bytes: u64,
    /// Trials that it took.
    pub trials: u64,
    /// Failed trials before the successful one.
    pub offset: u64,
    /// Interval that it was drawn with.
    pub interval: u64,
    /// Thread name.
    pub thread: Arc<str>,
    /// Allocator function, by its number in the table of allocators.
    pub function: u16,
    /// Call stack.
    pub stack: Arc<RawStack>,
    /// Whether its free will be seen.
    pub tracked: bool,
    /// It is a mapping, which goes by address and in parts.
    pub mapped: bool,
}

/// A sampled block that lives.
#[derive(Clone, Copy, Debug)]
struct LiveSample {
    address: u64,
    size_bytes: u64,
    trials: u64,
    offset: u64,
    time_ns: u64,
    row: u32,
    mapped: bool,
    /// The last reading of the kernel's live map that had it.
    seen: u8,
}

/// Everything known of all heaps.
#[derive(Default)]
pub struct Heap {
    rows: Slab<HeapRow>,
    index: HashMap<RowKey, u32>,
    spaces: HashMap<ProcessKey, HashMap<u64, LiveSample>>,
    mappings: HashMap<ProcessKey, MappedPieces>,
    totals: Estimated,
    by_class: ClassCounts,
    peak_bytes: f64,
    rising: bool,
    /// What an ended process had in use at its end stands apart from what is in use.
    ended_apart: bool,
    /// What came in since the time window was opened.
    windows: Windows,
    /// Rows that were put together.
    cold: Cold,
    /// Where frees go unseen.
    left: Left,
    /// What the kernel's live map has told.
    reconciliation: Reconciliation,
}

/// Estimated allocations by size class.
struct ClassCounts([f64; SIZE_CLASSES]);

impl Default for ClassCounts {
    fn default() -> Self {
        Self([0.0; SIZE_CLASSES])
    }
}

/// Running estimates, for the eye.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimated {
    /// Samples seen.
    pub samples: u64,
    /// Sampled blocks that live.
    pub live_samples: u64,
    /// Bytes allocated.
    pub alloc_bytes: f64,
    /// Bytes in use.
    pub inuse_bytes: f64,
}

/// A row and what it has in use.
pub struct Snapshot<'a> {
    /// The row.
    pub row: &'a HeapRow,
    /// In use at this moment; of an ended process at its end, unless that stands apart.
    pub inuse: SampleSums,
    /// In use when its process ended, if that stands apart.
    pub at_exit: SampleSums,
    /// In use at the peak.
    pub peak: SampleSums,
    /// Ages of the blocks that live: seconds, weight. Empty if they were not asked for.
    pub living: Vec<(f64, f64)>,
}

impl Heap {
    /// An empty heap. `ended_apart`: what a process has in use at its end stands apart from what is in use, as it does
    /// for whoever asks what a host's memory is used for; else it counts as in use, as the process's last state.
    pub fn new(ended_apart: bool) -> Self {
        Self { ended_apart, ..Self::default() }
    }

    /// A sample was allocated.
    pub fn allocate(&mut self, sample: Sample) {
        if !self.windows.covers(sample.time_ns) {
            return;
        }
        let row_number = self.row_of(&sample);
        let row = &mut self.rows[row_number as usize];
        row.alloc.record(sample.size_bytes, sample.trials, sample.offset, sample.interval);
        let weight = weight_of(sample.trials, sample.interval);
        let bytes = sample.size_bytes as f64 * weight;
        self.by_class.0[size_class(sample.size_bytes)] += weight;
        self.totals.samples += 1;
        self.totals.alloc_bytes += bytes;
        self.windows.record(row_number, &sample);
        if !sample.tracked || self.left.takes(sample.space, sample.process, sample.address) {
            row.untracked += 1;
            return;
        }
        if sample.mapped {
            let end = sample.address.saturating_add(sample.size_bytes);
            // The kernel maps whole pages, in place of whatever was there.
            self.unmap(sample.space, sample.address, end.checked_next_multiple_of(PAGE).unwrap_or(end), sample.time_ns);
            let pieces = self.mappings.entry(sample.space).or_default();
            pieces.map(sample.address, end, sample.id, sample.time_ns);
        }
        self.totals.inuse_bytes += bytes;
        self.totals.live_samples += 1;
        self.rows[row_number as usize].live += 1;
        self.rising = true;
        let live = LiveSample {
            address: sample.address,
            size_bytes: sample.size_bytes,
            trials: sample.trials,
            offset: sample.offset,
            time_ns: sample.time_ns,
            row: row_number,
            mapped: sample.mapped,
            seen: self.reconciliation.mark_of_new(),
        };
        self.spaces.entry(sample.space).or_default().insert(sample.id, live);
    }

    fn row_of(&mut self, sample: &Sample) -> u32 {
        let key = RowKey {
            process: sample.process,
            interval: sample.interval,
            thread: Arc::clone(&sample.thread),
            stack: Arc::as_ptr(&sample.stack),
            function: sample.function,
        };
        if let Some(number) = self.index.get(&key) {
            return *number;
        }
        self.make_room();
        let Sample { process, thread, function, interval, stack, time_ns, .. } = sample;
        self.row_like(HeapRow::new(*process, Arc::clone(thread), *function, *interval, stack, *time_ns))
    }

    /// The number of the row that is told apart by the same as this one, which is added if there is none.
    fn row_like(&mut self, row: HeapRow) -> u32 {
        let rows = &mut self.rows;
        *self.index.entry(RowKey::of(&row)).or_insert_with(|| rows.insert(row) as u32)
    }

    /// A sample was freed. One that is not known (freed already, as far as we know) is no error.
    pub fn free(&mut self, space: ProcessKey, id: u64, time_ns: u64, temporary: bool) {
        self.note_peak();
        let Some(live) = self.spaces.get_mut(&space).and_then(|samples| samples.remove(&id)) else { return };
        let weight = self.forget(&live);
        self.rows[live.row as usize].ages.record(time_ns.saturating_sub(live.time_ns), weight, temporary);
    }

    /// Addresses are mapped no longer since `time_ns`. A mapping shrinks by what it loses and keeps its weight; with its
    /// last byte it is freed.
    pub fn unmap(&mut self, space: ProcessKey, start: u64, end: u64, time_ns: u64) {
        let Some(pieces) = self.mappings.get_mut(&space) else { return };
        let lost = pieces.unmap(start, end, time_ns);
        if !lost.is_empty() {
            self.note_peak();
        }
        for (id, bytes) in lost {
            let Some(live) = self.spaces.get_mut(&space).and_then(|samples| samples.get_mut(&id)) else { continue };
            if live.size_bytes <= bytes {
                self.free(space, id, time_ns, false);
                continue;
            }
            live.size_bytes -= bytes;
            let (trials, row) = (live.trials, live.row);
            self.totals.inuse_bytes -= bytes as f64 * weight_of(trials, self.rows[row as usize].interval);
        }
    }

    /// Takes a block out of the running totals; returns its weight.
    fn forget(&mut self, live: &LiveSample) -> f64 {
        let row = &mut self.rows[live.row as usize];
        row.live -= 1;
        let weight = weight_of(live.trials, row.interval);
        self.totals.inuse_bytes -= live.size_bytes as f64 * weight;
        self.totals.live_samples -= 1;
        weight
    }

    /// A process ended: what lived in its address space counts as in use at its end. `was_live` takes a block out of the
    /// kernel's live map, by its address, and says whether it was there: one that was not had been freed unseen. Returns
    /// how many had.
    pub fn end(&mut self, space: ProcessKey, mut was_live: impl FnMut(u64) -> bool) -> u64 {
        self.note_peak();
        self.mappings.remove(&space);
        let mut unseen = 0;
        for live in self.spaces.remove(&space).unwrap_or_default().values() {
            self.forget(live);
            // Mappings are not in that map.
            if !live.mapped && !was_live(live.address) {
                unseen += 1;
            } else {
                let row = &mut self.rows[live.row as usize];
                row.ended.record(live.size_bytes, live.trials, live.offset, row.interval);
            }
        }
        unseen
    }

    /// A process replaced its program: nothing of the old one is in use any more. Returns the addresses.
    pub fn replace(&mut self, space: ProcessKey) -> Vec<u64> {
        self.note_peak();
        self.mappings.remove(&space);
        let samples = self.spaces.remove(&space).unwrap_or_default();
        for live in samples.values() {
            self.forget(live);
        }
        samples.into_values().map(|live| live.address).collect()
    }

    /// All probes are in place from this time on (CLOCK_MONOTONIC): what was sampled before, while they were being put on,
    /// does not count.
    pub fn window_begins(&mut self, since_ns: u64) {
        self.windows.begin(since_ns);
    }

    /// Probes are taken away from this time on: what is sampled later does not count.
    pub fn window_ends(&mut self, until_ns: u64) {
        self.windows.finish(until_ns);
    }

    /// From here on samples are of a time window, until it is closed.
    pub fn open_window(&mut self) {
        self.windows.open();
    }

    /// The window is over: it stands for so many times itself. A new one is open.
    pub fn close_window(&mut self, weights: &Weights) {
        let rows = &self.rows;
        let factor = |number| rows.get(number as usize).map_or(1.0, |row: &HeapRow| weights.of(&row.process));
        for (number, correction) in self.windows.close(factor) {
            self.correct(number, &correction);
        }
    }

    /// The last window that was closed stands for so many times itself more than was said.
    pub fn extend_window(&mut self, more: &Weights) {
        let rows = &self.rows;
        let more = |number| rows.get(number as usize).map_or(0.0, |row: &HeapRow| more.of(&row.process));
        for (number, correction) in self.windows.extend(more) {
            self.correct(number, &correction);
        }
    }

    /// There are no windows any more: every sample stands for itself.
    pub fn end_windows(&mut self) {
        self.windows = Windows::default();
    }

    fn correct(&mut self, number: u32, correction: &Correction) {
        if let Some(row) = self.rows.get_mut(number as usize) {
            correction.apply(&mut row.alloc);
            self.totals.alloc_bytes += correction.bytes;
        }
    }

    /// Before the total in use falls: is it a peak?
    fn note_peak(&mut self) {
        if !self.rising {
            return;
        }
        self.rising = false;
        if self.totals.inuse_bytes < self.peak_bytes * PEAK_STEP {
            return;
        }
        self.peak_bytes = self.totals.inuse_bytes;
        let sums = self.sum_live();
        for (number, row) in &mut self.rows {
            row.peak = sums[number];
        }
    }

    fn sum_live(&self) -> Vec<SampleSums> {
        let mut sums = vec![SampleSums::default(); self.rows.capacity()];
        // Most stacks have blocks of one size: their weight is computed once.
        let mut known: Vec<Option<(u64, Inclusion)>> = vec![None; self.rows.capacity()];
        for live in self.spaces.values().flat_map(HashMap::values) {
            let row = live.row as usize;
            if known[row].is_none_or(|(trials, _)| trials != live.trials) {
                known[row] = inclusion(live.trials, self.rows[row].interval).map(|it| (live.trials, it));
            }
            if let Some((_, inclusion)) = &known[row] {
                sums[row].record_included(live.size_bytes, live.offset, inclusion);
            }
        }
        sums
    }

    /// Estimated allocations so far by size class.
    pub const fn by_class(&self) -> &[f64; SIZE_CLASSES] {
        &self.by_class.0
    }

    /// Running estimates.
    pub const fn estimated(&self) -> Estimated {
        self.totals
    }

    /// Every row with what it has in use. Sums are made afresh from the blocks: nothing drifts. `ages`: with the ages
    /// of the blocks that live.
    pub fn snapshot(&mut self, now_ns: u64, ages: bool) -> impl Iterator<Item = Snapshot<'_>> {
        self.note_peak();
        let inuse = self.sum_live();
        let mut living: Vec<Vec<(f64, f64)>> = vec![Vec::new(); if ages { self.rows.capacity() } else { 0 }];
        if ages {
            for live in self.spaces.values().flat_map(HashMap::values) {
                let weight = weight_of(live.trials, self.rows[live.row as usize].interval);
                living[live.row as usize].push((now_ns.saturating_sub(live.time_ns) as f64 * 1e-9, weight));
            }
        }
        let apart = self.ended_apart;
        self.rows.iter().map(move |(number, row)| {
            let (mut inuse, mut at_exit) = (inuse[number], SampleSums::default());
            if apart { &mut at_exit } else { &mut inuse }.add(&row.ended);
            let living = living.get_mut(number).map(std::mem::take).unwrap_or_default();
            Snapshot { row, inuse, at_exit, peak: row.peak, living }
        })
    }

    /// Stacks of all rows have been carried away to be named.
    pub fn mark_named(&mut self) {
        for (_, row) in &mut self.rows {
            row.named = true;
        }
    }

    /// Takes the rows of ended processes out, except those with blocks that live on in another address space (a
    /// parent's, for a child of vfork) and those with samples of an open window: these stay for a later call. Returns the rows, and which processes are not done.
    pub fn retire(&mut self, ended: &HashSet<ProcessKey>) -> (Vec<HeapRow>, HashSet<ProcessKey>) {
        let of_ended = self.rows.iter().filter(|(_, row)| ended.contains(&row.process));
        let (done, held): (Vec<_>, Vec<_>) =
            of_ended.partition(|(number, row)| row.live == 0 && !self.windows.is_open_for(*number as u32));
        let held = held.into_iter().map(|(_, row)| row.process).collect();
        let done: Vec<usize> = done.into_iter().map(|(number, _)| number).collect();
        let retired = done.into_iter().map(|number| {
            let row = self.rows.remove(number);
            self.windows.forget(number as u32);
            self.index.remove(&RowKey::of(&row));
            row
        });
        (retired.collect(), held)
    }

    /// Stacks of all rows.
    pub fn stacks(&self) -> Vec<Arc<RawStack>> {
        self.rows.iter().map(|(_, row)| Arc::clone(&row.stack)).collect()
    }

    /// Address spaces in which a sampled block lives.
    pub fn spaces(&self) -> impl Iterator<Item = &ProcessKey> {
        self.spaces.keys()
    }
}

#[path = "cold.rs"]
mod cold;
#[path = "left.rs"]
mod left;
mod reconciliation;
#[path = "row.rs"]
mod row;
#[cfg(test)]
#[path = "live_tests.rs"]
mod tests;
