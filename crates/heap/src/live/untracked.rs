//! Address spaces whose frees are not tracked. Their blocks are dropped from the figures in use, and later allocations
//! only count as allocated until frees are tracked again. From that moment on, the heap of such a space starts over.

use std::collections::{HashMap, HashSet};

use heapbpf_statistics::sums::SampleSums;
use sampler_ebpf::abi::ProcessKey;

use super::growth::Curve;
use super::{Heap, LiveSample};
use crate::ages::Ages;
use crate::sample::Sample;

/// A block that is not tracked, although the kernel's live map may contain it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UntrackedBlock {
    /// Its address space.
    pub space: ProcessKey,
    /// Its address.
    pub address: u64,
    /// Its sample.
    pub sample: u64,
}

/// The address spaces whose frees are or were not tracked.
#[derive(Default)]
pub(super) struct Untracked {
    /// Address spaces whose frees are not tracked, and processes that allocated in them.
    processes: HashSet<ProcessKey>,
    /// When tracking of frees resumed, by address space (CLOCK_MONOTONIC). Earlier blocks do not count as in use.
    since: HashMap<ProcessKey, u64>,
    /// Blocks sampled in them since the last call of [`Heap::take_untracked_blocks`].
    blocks: Vec<UntrackedBlock>,
}

impl Untracked {
    /// Whether the free of a block may be missed. If so, records the block, and the process that allocated it.
    pub(super) fn note_block(&mut self, sample: &Sample) -> bool {
        let is_untracked = self.processes.contains(&sample.space);
        if is_untracked {
            self.processes.insert(sample.key.process);
        }
        let ignored = is_untracked || self.is_older(&sample.space, sample.time_ns);
        if ignored {
            let Sample { space, address, id, .. } = *sample;
            self.blocks.push(UntrackedBlock { space, address, sample: id });
        }
        ignored
    }

    /// Whether tracking of frees in an address space resumed after this time (CLOCK_MONOTONIC).
    fn is_older(&self, space: &ProcessKey, time_ns: u64) -> bool {
        self.since.get(space).is_some_and(|since| time_ns < *since)
    }
}

impl Heap {
    /// Stops tracking frees in an address space: drops its blocks, and counts later ones as allocated only. Returns the
    /// dropped blocks.
    pub fn stop_tracking(&mut self, space: ProcessKey) -> Vec<UntrackedBlock> {
        self.note_peak();
        self.untracked.processes.insert(space);
        let dropped = self.drop_blocks(space);
        for (_, live) in &dropped {
            // A vfork child allocates in its parent's address space.
            self.untracked.processes.insert(self.rows[live.row as usize].key.process);
        }
        // From now on the peak is that of the tracked processes.
        let processes = &self.untracked.processes;
        for (_, row) in self.rows.iter_mut().filter(|(_, row)| processes.contains(&row.key.process)) {
            row.peak = SampleSums::default();
        }
        self.lower_peak();
        dropped.into_iter().map(|(id, live)| untracked(space, id, &live)).collect()
    }

    /// Resumes tracking frees in an address space: every free since `since_ns` (CLOCK_MONOTONIC) is seen. Its heap
    /// starts over at that moment, and so do the lifetimes of its blocks. Returns the dropped blocks: older ones, and
    /// all mappings.
    pub fn track_again(&mut self, space: ProcessKey, since_ns: u64) -> Vec<UntrackedBlock> {
        self.note_peak();
        self.untracked.processes.remove(&space);
        self.untracked.since.insert(space, since_ns);
        for (_, row) in self.rows.iter_mut().filter(|(_, row)| row.key.process == space) {
            row.ages = Ages::default();
            row.curve = Curve::default();
            row.peak = SampleSums::default();
        }
        self.lower_peak();
        // Blocks that arrived before the moment was known may be from either side of it.
        let (newer, older): (Vec<_>, Vec<_>) =
            self.drop_blocks(space).into_iter().partition(|(_, live)| live.time_ns >= since_ns && !live.mapped);
        for (id, live) in newer {
            self.add_live(space, id, live);
        }
        older.into_iter().map(|(id, live)| untracked(space, id, &live)).collect()
    }

    /// Removes the live blocks of an address space from the figures, and returns them.
    fn drop_blocks(&mut self, space: ProcessKey) -> Vec<(u64, LiveSample)> {
        self.mappings.remove(&space);
        let samples = self.spaces.remove(&space).unwrap_or_default();
        for live in samples.values() {
            self.subtract_live(live);
        }
        samples.into_iter().collect()
    }

    /// When tracking of a process's frees resumed (CLOCK_MONOTONIC); `None` if it never stopped, or has not resumed.
    pub fn tracked_since(&self, process: &ProcessKey) -> Option<u64> {
        self.untracked.since.get(process).copied()
    }

    /// Whether the figures in use of any process only cover blocks since tracking resumed.
    pub fn tracks_some_again(&self) -> bool {
        !self.untracked.since.is_empty()
    }

    /// Whether a block allocated in this address space at this time (CLOCK_MONOTONIC) is not tracked.
    pub fn ignores(&self, space: &ProcessKey, time_ns: u64) -> bool {
        self.is_untracked(space) || self.untracked.is_older(space, time_ns)
    }

    /// Whether the process's memory in use is unknown because its frees are not tracked.
    pub fn is_untracked(&self, process: &ProcessKey) -> bool {
        self.untracked.processes.contains(process)
    }

    /// Returns the blocks sampled in untracked address spaces since the last call.
    pub fn take_untracked_blocks(&mut self) -> Vec<UntrackedBlock> {
        std::mem::take(&mut self.untracked.blocks)
    }

    /// Drops the state of these processes, which have ended.
    pub fn forget_processes(&mut self, ended: &HashSet<ProcessKey>) {
        self.untracked.processes.retain(|process| !ended.contains(process));
        self.untracked.since.retain(|process, _| !ended.contains(process));
        self.reconciliation.forget_processes(ended);
    }
}

fn untracked(space: ProcessKey, sample: u64, live: &LiveSample) -> UntrackedBlock {
    UntrackedBlock { space, address: live.address, sample }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{process, sample, stack};
    use super::*;
    use crate::sample::Sample;

    /// The block of a sample that [`sample`] made.
    fn block(tgid: u32, id: u64) -> UntrackedBlock {
        UntrackedBlock { space: process(tgid), address: id * 4096, sample: id }
    }

    /// Blocks allocated before the moment do not count, whether they arrived before it, after it, or while frees were
    /// not tracked. Blocks allocated after it count.
    #[test]
    fn tracked_again_the_heap_begins_anew() {
        let (mut heap, one) = (Heap::default(), stack());
        let at = |id: u64, time_ns| Sample { time_ns, ..sample(id, 1, 100, &one) };
        heap.allocate(at(1, 10));
        heap.allocate(at(2, 20));
        heap.free(process(1), 2, 25, false);
        heap.stop_tracking(process(1));
        heap.allocate(at(3, 30));
        assert_eq!(heap.take_untracked_blocks(), [block(1, 3)]);
        assert_eq!(heap.track_again(process(1), 50), []);
        assert!(!heap.is_untracked(&process(1)) && heap.tracks_some_again());
        assert_eq!((heap.tracked_since(&process(1)), heap.tracked_since(&process(2))), (Some(50), None));
        // Its record arrives late.
        heap.allocate(at(4, 49));
        assert_eq!(heap.take_untracked_blocks(), [block(1, 4)]);
        heap.allocate(at(5, 50));
        heap.allocate(at(6, 60));
        heap.free(process(1), 6, 70, false);
        // The free of a block from before that moment.
        heap.free(process(1), 1, 70, false);
        assert!(heap.take_untracked_blocks().is_empty());
        let rows: Vec<_> = heap
            .snapshot(0, false)
            .map(|it| (it.row.alloc.samples, it.inuse.samples, it.peak.samples, it.row.ages.freed()))
            .collect();
        // Only the lifetime of block 6 is recorded.
        assert_eq!(rows, [(6, 1, 2, 1.0)]);
        assert_eq!((heap.estimated().inuse_bytes, heap.estimated().live_samples), (100.0, 1));
        assert!(heap.ignores(&process(1), 49) && !heap.ignores(&process(1), 50) && !heap.ignores(&process(2), 0));
        heap.forget_processes(&HashSet::from([process(1)]));
        assert!(!heap.tracks_some_again());
    }
}
