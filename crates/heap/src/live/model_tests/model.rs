//! What the heap should be: lists of blocks and of mapped cells. Nothing is stored that can be computed.

use std::collections::{BTreeMap, BTreeSet};

use heapbpf_profile::model::LossBound;

use super::super::{LostRecords, PAGE, PEAK_STEP};
use crate::sample::Sample;

/// Bytes of a cell. Mappings begin and end on cell boundaries. A page has several cells, because the `brk` heap ends
/// within a page.
pub const CELL: u64 = 1024;

/// Process, sampling interval and stack of a row.
pub type Key = (u32, u64, usize);

/// w = 1 / (1 − (1 − 1/R)ⁿ), by the formula.
pub fn weight_of(trials: u64, interval: u64) -> f64 {
    1.0 / (1.0 - (1.0 - 1.0 / interval as f64).powf(trials as f64))
}

/// Sums of blocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sums {
    pub samples: u64,
    pub sampled_bytes: u64,
    pub bytes: f64,
}

impl Sums {
    pub fn add(&mut self, other: &Self) {
        self.samples += other.samples;
        self.sampled_bytes += other.sampled_bytes;
        self.bytes += other.bytes;
    }

    pub fn is_near(&self, other: &Self, near: fn(f64, f64) -> bool) -> bool {
        (self.samples, self.sampled_bytes) == (other.samples, other.sampled_bytes) && near(self.bytes, other.bytes)
    }
}

/// A row's data apart from its sums in use.
#[derive(Clone, Copy, Debug, Default)]
pub struct Row {
    pub alloc: Sums,
    pub untracked: u64,
    pub at_exit: Sums,
    pub peak: Sums,
    /// Weights of the freed blocks, of the temporary ones among them, and of those that were left or are in use.
    pub freed: f64,
    pub temporary: f64,
    pub left: f64,
}

impl Row {
    pub fn add(&mut self, other: &Self) {
        self.alloc.add(&other.alloc);
        self.untracked += other.untracked;
        self.at_exit.add(&other.at_exit);
        self.peak.add(&other.peak);
        self.freed += other.freed;
        self.temporary += other.temporary;
        self.left += other.left;
    }

    pub fn is_near(&self, other: &Self, near: fn(f64, f64) -> bool) -> bool {
        self.alloc.is_near(&other.alloc, near)
            && self.untracked == other.untracked
            && self.at_exit.is_near(&other.at_exit, near)
            && self.peak.is_near(&other.peak, near)
            && near(self.freed, other.freed)
            && near(self.temporary, other.temporary)
            && near(self.left, other.left)
    }
}

/// A sampled block that is in use.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    pub row: Key,
    pub address: u64,
    pub mapped: bool,
    size_bytes: u64,
    weight: f64,
    time_ns: u64,
}

impl Block {
    fn sums(&self) -> Sums {
        Sums { samples: 1, sampled_bytes: self.size_bytes, bytes: self.size_bytes as f64 * self.weight }
    }
}

/// The sample that a cell belongs to, and when it was mapped.
#[derive(Clone, Copy, Debug)]
struct Cell {
    sample: u64,
    since_ns: u64,
}

/// The heaps of all processes. Address spaces are identified by their thread group.
#[derive(Default)]
pub struct Model {
    pub samples: u64,
    pub alloc_bytes: f64,
    pub objects: f64,
    /// By space and sample.
    pub live: BTreeMap<(u32, u64), Block>,
    pub untracked: BTreeSet<u32>,
    pub since: BTreeMap<u32, u64>,
    /// Space, sample and address of blocks that were sampled while frees were not tracked.
    pub ignored: Vec<(u32, u64, u64)>,
    pub recovered: BTreeMap<u32, LossBound>,
    rows: BTreeMap<Key, Row>,
    /// By space and cell number.
    cells: BTreeMap<(u32, u64), Cell>,
    rising: bool,
    peak_bytes: f64,
}

impl Model {
    pub fn allocate(&mut self, sample: &Sample, stack: usize) {
        let (space, process) = (sample.space.tgid, sample.key.process.tgid);
        let row = (process, sample.key.interval, stack);
        let Sample { address, mapped, size_bytes, time_ns, .. } = *sample;
        let block = Block { row, address, mapped, size_bytes, weight: weight_of(sample.trials, row.1), time_ns };
        self.samples += 1;
        self.objects += block.weight;
        self.alloc_bytes += block.sums().bytes;
        let of_row = self.rows.entry(row).or_default();
        of_row.alloc.add(&block.sums());
        let is_ignored = sample.tracked && self.ignores(space, time_ns);
        if is_ignored {
            if self.untracked.contains(&space) {
                self.untracked.insert(process);
            }
            self.ignored.push((space, sample.id, address));
            self.ignored.sort_unstable();
        }
        if is_ignored || !sample.tracked {
            self.rows.entry(row).or_default().untracked += 1;
            return;
        }
        if mapped {
            let end = address + size_bytes;
            self.unmap(space, address, end.next_multiple_of(PAGE), time_ns);
            let cell = Cell { sample: sample.id, since_ns: time_ns };
            self.cells.extend((address / CELL..end / CELL).map(|at| ((space, at), cell)));
        }
        self.live.insert((space, sample.id), block);
        self.rising = true;
    }

    pub fn ignores(&self, space: u32, time_ns: u64) -> bool {
        self.untracked.contains(&space) || self.since.get(&space).is_some_and(|since| time_ns < *since)
    }

    pub fn inuse_bytes(&self) -> f64 {
        self.live.values().map(|block| block.sums().bytes).sum()
    }

    /// Records the sums in use as the peak, if the total rose since the last fall and is well above the last peak.
    fn note_peak(&mut self) {
        let total = self.inuse_bytes();
        if std::mem::take(&mut self.rising) && total >= self.peak_bytes * PEAK_STEP {
            self.peak_bytes = total;
            self.rows.values_mut().for_each(|row| row.peak = Sums::default());
            for block in self.live.values() {
                self.rows.entry(block.row).or_default().peak.add(&block.sums());
            }
        }
    }

    pub fn free(&mut self, space: u32, sample: u64, temporary: bool) {
        self.note_peak();
        if let Some(block) = self.live.remove(&(space, sample)) {
            let row = self.rows.entry(block.row).or_default();
            row.freed += block.weight;
            row.temporary += if temporary { block.weight } else { 0.0 };
        }
    }

    /// Takes the cells of a space for which `is_gone` holds and that were mapped up to `until_ns`. Returns each run of
    /// contiguous cells of one sample: the sample and the run's bytes.
    fn take_cells(&mut self, space: u32, until_ns: u64, is_gone: impl Fn(u64) -> bool) -> Vec<(u64, u64)> {
        let gone: Vec<(u64, u64)> = self
            .cells
            .extract_if((space, 0)..=(space, u64::MAX), |(_, at), cell| cell.since_ns <= until_ns && is_gone(at * CELL))
            .map(|((_, at), cell)| (at, cell.sample))
            .collect();
        runs(&gone)
    }

    pub fn unmap(&mut self, space: u32, start: u64, end: u64, until_ns: u64) {
        let gone = self.take_cells(space, until_ns, |at| (start..end).contains(&at));
        if !gone.is_empty() {
            self.note_peak();
        }
        for (sample, bytes) in gone {
            if self.shrink(space, sample, bytes) {
                self.free(space, sample, false);
            }
        }
    }

    /// Takes bytes away from a mapping. Returns whether nothing is left of it.
    fn shrink(&mut self, space: u32, sample: u64, bytes: u64) -> bool {
        let Some(block) = self.live.get_mut(&(space, sample)) else { return false };
        block.size_bytes -= bytes;
        block.size_bytes == 0
    }

    pub fn keep_mapped(&mut self, space: u32, ranges: &[(u64, u64)], until_ns: u64) -> LossBound {
        let is_kept = |at: u64| ranges.iter().any(|(start, end)| (*start..*end).contains(&at));
        let gone = self.take_cells(space, until_ns, |at| !is_kept(at));
        self.rising &= gone.is_empty();
        let mut found = LossBound::default();
        for (sample, bytes) in gone {
            let in_pages = self.live.get(&(space, sample)).is_some_and(|block| block.address % PAGE == 0);
            let sampled_bytes = if in_pages { bytes.next_multiple_of(PAGE) } else { bytes };
            found.add(&LossBound { samples: 1, sampled_bytes });
            if self.shrink(space, sample, bytes) {
                self.live.remove(&(space, sample));
            }
        }
        found
    }

    pub fn mapped_by(&self, space: u32, until_ns: u64) -> LossBound {
        let cells = self.cells.range((space, 0)..=(space, u64::MAX));
        let mapped: Vec<(u64, u64)> =
            cells.filter(|(_, cell)| cell.since_ns <= until_ns).map(|((_, at), cell)| (*at, cell.sample)).collect();
        let pieces = runs(&mapped);
        LossBound { samples: pieces.len() as u64, sampled_bytes: pieces.iter().map(|(_, bytes)| bytes).sum() }
    }

    /// Takes all blocks of a space.
    fn take_space(&mut self, space: u32) -> Vec<(u64, Block)> {
        self.cells.retain(|(of, _), _| *of != space);
        self.live.extract_if((space, 0)..=(space, u64::MAX), |_, _| true).map(|((_, id), block)| (id, block)).collect()
    }

    pub fn end(&mut self, space: u32, was_live: impl Fn(u64) -> bool) -> u64 {
        self.note_peak();
        let mut lost_frees = 0;
        for (_, block) in self.take_space(space) {
            if block.mapped || was_live(block.address) {
                let row = self.rows.entry(block.row).or_default();
                row.at_exit.add(&block.sums());
                row.left += block.weight;
            } else {
                lost_frees += 1;
            }
        }
        lost_frees
    }

    pub fn replace(&mut self, space: u32) -> Vec<u64> {
        self.note_peak();
        let blocks = self.take_space(space);
        blocks.iter().for_each(|(_, block)| self.rows.entry(block.row).or_default().left += block.weight);
        let mut addresses: Vec<u64> = blocks.iter().map(|(_, block)| block.address).collect();
        addresses.sort_unstable();
        addresses
    }

    /// Drops the peaks of some processes.
    fn drop_peaks(&mut self, of: impl Fn(u32) -> bool) {
        for (_, row) in self.rows.iter_mut().filter(|((process, ..), _)| of(*process)) {
            row.peak = Sums::default();
        }
        self.lower_peak();
    }

    /// The peak to exceed is from now on that of the remaining rows, and the total may exceed it already.
    fn lower_peak(&mut self) {
        self.peak_bytes = self.rows.values().map(|row| row.peak.bytes).sum();
        self.rising = true;
    }

    pub fn stop_tracking(&mut self, space: u32) -> Vec<(u32, u64, u64)> {
        self.note_peak();
        let blocks = self.take_space(space);
        self.untracked.insert(space);
        self.untracked.extend(blocks.iter().map(|(_, block)| block.row.0));
        let untracked = self.untracked.clone();
        self.drop_peaks(|process| untracked.contains(&process));
        blocks.into_iter().map(|(id, block)| (space, id, block.address)).collect()
    }

    pub fn track_again(&mut self, space: u32, since_ns: u64) -> Vec<(u32, u64, u64)> {
        self.note_peak();
        self.untracked.remove(&space);
        self.since.insert(space, since_ns);
        for (_, row) in self.rows.iter_mut().filter(|((process, ..), _)| *process == space) {
            (row.freed, row.temporary, row.left) = (0.0, 0.0, 0.0);
        }
        self.drop_peaks(|process| process == space);
        let blocks = self.take_space(space);
        let (newer, older): (Vec<_>, Vec<_>) =
            blocks.into_iter().partition(|(_, block)| block.time_ns >= since_ns && !block.mapped);
        self.live.extend(newer.into_iter().map(|(id, block)| ((space, id), block)));
        older.into_iter().map(|(id, block)| (space, id, block.address)).collect()
    }

    /// Adds those of the `unknown` blocks that are still unknown, and removes the other blocks that `keeps` does not
    /// accept.
    pub fn reconcile(&mut self, unknown: &[(Sample, usize)], keeps: impl Fn(u64) -> bool) -> LostRecords {
        self.rising = false;
        let unknown: Vec<_> =
            unknown.iter().filter(|(it, _)| !self.live.contains_key(&(it.space.tgid, it.id))).collect();
        let frees = self.live.extract_if(.., |(_, id), block| !block.mapped && !keeps(*id)).count() as u64;
        for (sample, stack) in &unknown {
            let recovered = self.recovered.entry(sample.key.process.tgid).or_default();
            recovered.add(&LossBound { samples: 1, sampled_bytes: sample.size_bytes });
            self.allocate(sample, *stack);
        }
        LostRecords { frees, allocations: unknown.len() as u64 }
    }

    /// Removes the rows of an ended process that have no blocks. Returns their number, and whether the process has
    /// other rows.
    pub fn retire(&mut self, ended: u32) -> (usize, bool) {
        let held: BTreeSet<Key> = self.live.values().map(|block| block.row).collect();
        let is_done = |key: &Key| key.0 == ended && !held.contains(key);
        let done: Vec<_> = self.rows.extract_if(.., |key, _| is_done(key)).collect();
        if done.iter().any(|(_, row)| row.peak.bytes > 0.0) {
            self.lower_peak();
        }
        self.untracked.remove(&ended);
        self.since.remove(&ended);
        self.recovered.remove(&ended);
        (done.len(), self.rows.keys().any(|key| key.0 == ended))
    }

    /// Number and bytes of the blocks after each mark and not after the next one.
    pub fn inuse_by_mark<const N: usize>(&self, marks_ns: &[u64; N]) -> [(u64, u64); N] {
        std::array::from_fn(|index| {
            let end_ns = marks_ns.get(index + 1).copied().unwrap_or(u64::MAX);
            let blocks = self.live.values().filter(|it| it.time_ns > marks_ns[index] && it.time_ns <= end_ns);
            blocks.fold((0, 0), |(samples, bytes), block| (samples + 1, bytes + block.size_bytes))
        })
    }

    /// Each row, with its sums in use.
    pub fn snapshot(&mut self, ended_apart: bool) -> Vec<(Key, Row, Sums)> {
        self.note_peak();
        let rows = self.rows.iter().map(|(key, row)| {
            let (mut row, mut inuse) = (*row, Sums::default());
            for block in self.live.values().filter(|block| block.row == *key) {
                inuse.add(&block.sums());
                row.left += block.weight;
            }
            if !ended_apart {
                inuse.add(&std::mem::take(&mut row.at_exit));
            }
            (*key, row, inuse)
        });
        rows.collect()
    }
}

/// Joins contiguous cells (number and sample) of one sample. Returns the sample and the bytes of each run.
fn runs(cells: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let runs = cells.chunk_by(|(at, sample), (next, of)| at + 1 == *next && sample == of);
    runs.map(|run| (run[0].1, run.len() as u64 * CELL)).collect()
}
