//! The heap as known from samples: sums per stack, and the sampled blocks that live. Pure: events in, sums out.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use sampler_ebpf::abi::ProcessKey;
use sampler_ebpf::trials::{SIZE_CLASSES, size_class};

use super::ages::Ages;
use super::sums::SampleSums;
use crate::sampling::weight::inclusion;
use crate::unwind::raw::RawStack;

/// Weight of a sample; one of no trials or without an interval cannot exist and weighs nothing.
fn weight_of(trials: u64, interval: u64) -> f64 {
    inclusion(trials, interval).map_or(0.0, |inclusion| inclusion.weight)
}

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
}

/// What rows are told apart by. Stacks are compared by address: equal ones are one (the unwinder sees to it).
#[derive(PartialEq, Eq, Hash)]
struct RowKey {
    process: ProcessKey,
    interval: u64,
    thread: Arc<str>,
    stack: *const RawStack,
    function: u16,
}

/// Sums of one stack of one thread name of one process, under one interval.
#[derive(Clone, Debug)]
pub struct HeapRow {
    /// Process.
    pub process: ProcessKey,
    /// Thread name.
    pub thread: Arc<str>,
    /// Allocator function.
    pub function: u16,
    /// Interval of these samples.
    pub interval: u64,
    /// Call stack.
    pub stack: Arc<RawStack>,
    /// CLOCK_MONOTONIC of its first sample.
    pub first_ns: u64,
    /// All samples.
    pub alloc: SampleSums,
    /// Samples that could not be followed.
    pub untracked: u64,
    /// Ages of freed blocks.
    pub ages: Ages,
    /// Blocks that were live when their process ended.
    ended: SampleSums,
    /// Sums at the peak.
    peak: SampleSums,
}

// SAFETY: `stack` is only compared and hashed; the row beside it keeps what it points to alive.
unsafe impl Send for RowKey {}

/// A sampled block that lives.
#[derive(Clone, Copy, Debug)]
struct LiveSample {
    address: u64,
    size_bytes: u64,
    trials: u64,
    offset: u64,
    time_ns: u64,
    row: u32,
}

/// Everything known of all heaps.
#[derive(Default)]
pub struct Heap {
    rows: Vec<HeapRow>,
    index: HashMap<RowKey, u32>,
    spaces: HashMap<ProcessKey, HashMap<u64, LiveSample>>,
    totals: Estimated,
    by_class: ClassCounts,
    peak_bytes: f64,
    rising: bool,
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
    /// In use at this moment, or at the end of its process.
    pub inuse: SampleSums,
    /// In use at the peak.
    pub peak: SampleSums,
    /// Ages of the blocks that live: seconds, weight.
    pub living: Vec<(f64, f64)>,
}

impl Heap {
    /// A sample was allocated.
    pub fn allocate(&mut self, sample: Sample) {
        let row_number = self.row_of(&sample);
        let row = &mut self.rows[row_number as usize];
        row.alloc.record(sample.size_bytes, sample.trials, sample.offset, sample.interval);
        let weight = weight_of(sample.trials, sample.interval);
        let bytes = sample.size_bytes as f64 * weight;
        self.by_class.0[size_class(sample.size_bytes)] += weight;
        self.totals.samples += 1;
        self.totals.alloc_bytes += bytes;
        if !sample.tracked {
            row.untracked += 1;
            return;
        }
        self.totals.inuse_bytes += bytes;
        self.totals.live_samples += 1;
        self.rising = true;
        let live = LiveSample {
            address: sample.address,
            size_bytes: sample.size_bytes,
            trials: sample.trials,
            offset: sample.offset,
            time_ns: sample.time_ns,
            row: row_number,
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
        *self.index.entry(key).or_insert_with(|| {
            self.rows.push(HeapRow {
                process: sample.process,
                thread: Arc::clone(&sample.thread),
                function: sample.function,
                interval: sample.interval,
                stack: Arc::clone(&sample.stack),
                first_ns: sample.time_ns,
                alloc: SampleSums::default(),
                untracked: 0,
                ages: Ages::default(),
                ended: SampleSums::default(),
                peak: SampleSums::default(),
            });
            (self.rows.len() - 1) as u32
        })
    }

    /// A sample was freed. One that is not known (freed already, as far as we know) is no error.
    pub fn free(&mut self, space: ProcessKey, id: u64, time_ns: u64, temporary: bool) {
        self.note_peak();
        let Some(live) = self.spaces.get_mut(&space).and_then(|samples| samples.remove(&id)) else { return };
        let weight = self.forget(&live);
        self.rows[live.row as usize].ages.record(time_ns.saturating_sub(live.time_ns), weight, temporary);
    }

    /// Takes a block out of the running totals; returns its weight.
    fn forget(&mut self, live: &LiveSample) -> f64 {
        let weight = weight_of(live.trials, self.rows[live.row as usize].interval);
        self.totals.inuse_bytes -= live.size_bytes as f64 * weight;
        self.totals.live_samples -= 1;
        weight
    }

    /// A process ended: what lived in its address space counts as in use at its end. Returns the addresses.
    pub fn end(&mut self, space: ProcessKey) -> Vec<u64> {
        self.note_peak();
        let samples = self.spaces.remove(&space).unwrap_or_default();
        for live in samples.values() {
            self.forget(live);
            let row = &mut self.rows[live.row as usize];
            row.ended.record(live.size_bytes, live.trials, live.offset, row.interval);
        }
        samples.into_values().map(|live| live.address).collect()
    }

    /// A process replaced its program: nothing of the old one is in use any more. Returns the addresses.
    pub fn replace(&mut self, space: ProcessKey) -> Vec<u64> {
        self.note_peak();
        let samples = self.spaces.remove(&space).unwrap_or_default();
        for live in samples.values() {
            self.forget(live);
        }
        samples.into_values().map(|live| live.address).collect()
    }

    /// Makes the kernel's live map the truth: blocks that are not in it were freed, unseen. Returns how many.
    pub fn reconcile(&mut self, truth: &HashMap<ProcessKey, HashSet<u64>>) -> u64 {
        self.note_peak();
        let mut gone = Vec::new();
        for (space, samples) in &mut self.spaces {
            let known = truth.get(space);
            samples.retain(|id, live| {
                let lives = known.is_some_and(|ids| ids.contains(id));
                if !lives {
                    gone.push(*live);
                }
                lives
            });
        }
        for live in &gone {
            self.forget(live);
        }
        gone.len() as u64
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
        for (row, sums) in self.rows.iter_mut().zip(sums) {
            row.peak = sums;
        }
    }

    fn sum_live(&self) -> Vec<SampleSums> {
        let mut sums = vec![SampleSums::default(); self.rows.len()];
        for live in self.spaces.values().flat_map(HashMap::values) {
            let interval = self.rows[live.row as usize].interval;
            sums[live.row as usize].record(live.size_bytes, live.trials, live.offset, interval);
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

    /// Every row with what it has in use. Sums are made afresh from the blocks: nothing drifts.
    pub fn snapshot(&mut self, now_ns: u64) -> Vec<Snapshot<'_>> {
        self.note_peak();
        let mut inuse = self.sum_live();
        let mut living: Vec<Vec<(f64, f64)>> = vec![Vec::new(); self.rows.len()];
        for live in self.spaces.values().flat_map(HashMap::values) {
            let weight = weight_of(live.trials, self.rows[live.row as usize].interval);
            living[live.row as usize].push((now_ns.saturating_sub(live.time_ns) as f64 * 1e-9, weight));
        }
        for (row, sums) in self.rows.iter().zip(&mut inuse) {
            sums.add(&row.ended);
        }
        self.rows
            .iter()
            .zip(inuse)
            .zip(living)
            .map(|((row, inuse), living)| Snapshot { row, inuse, peak: row.peak, living })
            .collect()
    }

    /// Address spaces in which a sampled block lives.
    pub fn spaces(&self) -> impl Iterator<Item = &ProcessKey> {
        self.spaces.keys()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unwind::raw::{Completeness, UnwinderKind};

    fn stack() -> Arc<RawStack> {
        Arc::new(RawStack {
            frames: Box::new([]),
            unwinder: UnwinderKind::Caller,
            completeness: Completeness::Complete,
        })
    }

    fn process(tgid: u32) -> ProcessKey {
        ProcessKey { start_ns: 1, tgid, exec_id: 0 }
    }

    fn sample(id: u64, tgid: u32, size_bytes: u64, stack: &Arc<RawStack>) -> Sample {
        Sample {
            id,
            process: process(tgid),
            space: process(tgid),
            time_ns: id * 1000,
            address: id * 4096,
            size_bytes,
            trials: size_bytes.max(1),
            offset: 0,
            interval: 1,
            thread: "main".into(),
            function: 0,
            stack: Arc::clone(stack),
            tracked: true,
        }
    }

    fn inuse(heap: &mut Heap) -> Vec<(u64, f64)> {
        heap.snapshot(0).iter().map(|s| (s.inuse.samples, s.inuse.bytes)).collect()
    }

    #[test]
    fn what_is_allocated_and_not_freed_is_in_use() {
        let (mut heap, one) = (Heap::default(), stack());
        for id in 1..=10 {
            heap.allocate(sample(id, 1, 100, &one));
        }
        for id in 1..=4 {
            heap.free(process(1), id, 50_000, false);
        }
        heap.free(process(1), 4, 50_000, false);
        heap.free(process(2), 5, 50_000, false);
        assert_eq!(inuse(&mut heap), [(6, 600.0)]);
        assert_eq!(heap.estimated().live_samples, 6);
        assert_eq!(heap.snapshot(0)[0].row.alloc.bytes, 1000.0);
    }

    #[test]
    fn an_ended_process_keeps_its_last_state_and_a_replaced_one_does_not() {
        let (mut heap, one) = (Heap::default(), stack());
        heap.allocate(sample(1, 1, 10, &one));
        heap.allocate(sample(2, 2, 20, &one));
        assert_eq!(heap.end(process(1)), [4096]);
        assert_eq!(heap.replace(process(2)), [8192]);
        assert_eq!(inuse(&mut heap), [(1, 10.0), (0, 0.0)]);
        assert_eq!(heap.estimated().inuse_bytes, 0.0);
    }

    #[test]
    fn the_kernel_is_the_truth() {
        let (mut heap, one) = (Heap::default(), stack());
        for id in 1..=5 {
            heap.allocate(sample(id, 1, 8, &one));
        }
        let truth = HashMap::from([(process(1), HashSet::from([2, 4, 99]))]);
        assert_eq!(heap.reconcile(&truth), 3);
        assert_eq!(inuse(&mut heap), [(2, 16.0)]);
    }

    #[test]
    fn the_peak_is_what_was_in_use_at_the_highest_total() {
        let (mut heap, one, two) = (Heap::default(), stack(), stack());
        heap.allocate(sample(1, 1, 1000, &one));
        heap.allocate(sample(2, 1, 500, &two));
        heap.free(process(1), 1, 0, false);
        heap.allocate(sample(3, 1, 600, &two));
        heap.free(process(1), 2, 0, false);
        let peaks: Vec<f64> = heap.snapshot(0).iter().map(|s| s.peak.bytes).collect();
        assert_eq!(peaks, [1000.0, 500.0]);
    }

    #[test]
    fn a_sample_that_cannot_be_followed_counts_as_allocated_only() {
        let (mut heap, one) = (Heap::default(), stack());
        heap.allocate(Sample { tracked: false, ..sample(1, 1, 10, &one) });
        assert_eq!(inuse(&mut heap), [(0, 0.0)]);
        assert_eq!(heap.snapshot(0)[0].row.untracked, 1);
    }

    #[test]
    fn rows_differ_by_thread_function_interval_and_stack() {
        let (mut heap, one, two) = (Heap::default(), stack(), stack());
        heap.allocate(sample(1, 1, 10, &one));
        heap.allocate(sample(2, 1, 10, &one));
        heap.allocate(sample(3, 1, 10, &two));
        heap.allocate(Sample { thread: "other".into(), ..sample(4, 1, 10, &one) });
        heap.allocate(Sample { function: 1, ..sample(5, 1, 10, &one) });
        heap.allocate(Sample { interval: 64, ..sample(6, 1, 10, &one) });
        assert_eq!(heap.snapshot(0).len(), 5);
    }
}
