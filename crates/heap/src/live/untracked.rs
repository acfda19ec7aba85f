//! Address spaces whose frees are not tracked: their blocks are dropped from the figures in use, and later allocations
//! count as allocated only, until frees are tracked again. From that moment on the heap of such a space begins anew.

use std::collections::{HashMap, HashSet};

use heapbpf_statistics::sums::SampleSums;
use sampler_ebpf::abi::ProcessKey;

use super::growth::Curve;
use super::{Heap, LiveSample};
use crate::ages::Ages;
use crate::sample::Sample;

/// A block that is not tracked, though the kernel's live map may have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UntrackedBlock {
    /// Its address space.
    pub space: ProcessKey,
    /// Its address.
    pub address: u64,
    /// Its sample.
    pub sample: u64,
}

/// Where frees are not tracked.
#[derive(Default)]
pub(super) struct Untracked {
    /// Address spaces whose frees are not tracked, and processes that allocated there.
    processes: HashSet<ProcessKey>,
    /// Since when frees of an address space are tracked again (CLOCK_MONOTONIC). Earlier blocks are not in use.
    since: HashMap<ProcessKey, u64>,
    /// Blocks sampled there since the last call of [`Heap::take_untracked_blocks`].
    blocks: Vec<UntrackedBlock>,
}

impl Untracked {
    /// Whether the free of a block may not be seen. If so, the block is noted, and the process that allocated it.
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

    /// Whether frees of an address space were not tracked at some time after this one (CLOCK_MONOTONIC).
    fn is_older(&self, space: &ProcessKey, time_ns: u64) -> bool {
        self.since.get(space).is_some_and(|since| time_ns < *since)
    }
}

impl Heap {
    /// Stops tracking frees in an address space: its blocks are dropped, and later ones count as allocated only. Returns the
    /// dropped blocks.
    pub fn stop_tracking(&mut self, space: ProcessKey) -> Vec<UntrackedBlock> {
        self.note_peak();
        self.untracked.processes.insert(space);
        let dropped = self.drop_blocks(space);
        for (_, live) in &dropped {
            // A vfork child allocates in its parent's address space.
            self.untracked.processes.insert(self.rows[live.row as usize].key.process);
        }
        // From now on the peak is that of the tracked processes. Its moment stays: sums of other moments are not kept.
        self.peak_bytes = 0.0;
        for (_, row) in &mut self.rows {
            if self.untracked.processes.contains(&row.key.process) {
                row.peak = SampleSums::default();
            }
            self.peak_bytes += row.peak.bytes;
        }
        dropped.into_iter().map(|(id, live)| untracked(space, id, &live)).collect()
    }

    /// Tracks frees in an address space again: every free since `since_ns` (CLOCK_MONOTONIC) is seen. Its heap begins anew
    /// at that moment, and so do the lifetimes of its blocks. Returns the blocks that are dropped because they are older.
    pub fn track_again(&mut self, space: ProcessKey, since_ns: u64) -> Vec<UntrackedBlock> {
        self.note_peak();
        self.untracked.processes.remove(&space);
        self.untracked.since.insert(space, since_ns);
        for (_, row) in self.rows.iter_mut().filter(|(_, row)| row.key.process == space) {
            row.ages = Ages::default();
            row.curve = Curve::default();
            row.peak = SampleSums::default();
        }
        self.peak_bytes = self.rows.iter().map(|(_, row)| row.peak.bytes).sum();
        // What came in before the moment was known may be of either side of it.
        let (newer, older): (Vec<_>, Vec<_>) =
            self.drop_blocks(space).into_iter().partition(|(_, live)| live.time_ns >= since_ns && !live.mapped);
        for (id, live) in newer {
            self.add_live(space, id, live);
        }
        older.into_iter().map(|(id, live)| untracked(space, id, &live)).collect()
    }

    /// Takes the live blocks of an address space out of the figures, and returns them.
    fn drop_blocks(&mut self, space: ProcessKey) -> Vec<(u64, LiveSample)> {
        self.mappings.remove(&space);
        let samples = self.spaces.remove(&space).unwrap_or_default();
        for live in samples.values() {
            self.subtract_live(live);
        }
        samples.into_iter().collect()
    }

    /// Since when frees of a process are tracked again (CLOCK_MONOTONIC); `None` if they always were.
    pub fn tracked_since(&self, process: &ProcessKey) -> Option<u64> {
        self.untracked.since.get(process).copied()
    }

    /// Whether figures in use of any process are of later blocks only.
    pub fn tracks_some_again(&self) -> bool {
        !self.untracked.since.is_empty()
    }

    /// Whether a block of an address space that was allocated at this time (CLOCK_MONOTONIC) is not tracked.
    pub fn ignores(&self, space: &ProcessKey, time_ns: u64) -> bool {
        self.is_untracked(space) || self.untracked.is_older(space, time_ns)
    }

    /// Whether the memory in use by a process is unknown because its frees are not tracked.
    pub fn is_untracked(&self, process: &ProcessKey) -> bool {
        self.untracked.processes.contains(process)
    }

    /// The blocks sampled in untracked address spaces since the last call.
    pub fn take_untracked_blocks(&mut self) -> Vec<UntrackedBlock> {
        std::mem::take(&mut self.untracked.blocks)
    }

    /// Drops what is kept for each of these processes, which have ended.
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

    /// The block of a sample, as [`sample`] makes it.
    fn block(tgid: u32, id: u64) -> UntrackedBlock {
        UntrackedBlock { space: process(tgid), address: id * 4096, sample: id }
    }

    /// What was allocated before the moment does not count, whether it was taken in before it, after it, or while frees
    /// were not tracked; what came after it does.
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
        // Its record comes late.
        heap.allocate(at(4, 49));
        assert_eq!(heap.take_untracked_blocks(), [block(1, 4)]);
        heap.allocate(at(5, 50));
        heap.allocate(at(6, 60));
        heap.free(process(1), 6, 70, false);
        // The free of a block from before the moment.
        heap.free(process(1), 1, 70, false);
        assert!(heap.take_untracked_blocks().is_empty());
        let rows: Vec<_> = heap
            .snapshot(0, false)
            .map(|it| (it.row.alloc.samples, it.inuse.samples, it.peak.samples, it.row.ages.freed()))
            .collect();
        // Of lifetimes, that of block 6.
        assert_eq!(rows, [(6, 1, 2, 1.0)]);
        assert_eq!((heap.estimated().inuse_bytes, heap.estimated().live_samples), (100.0, 1));
        assert!(heap.ignores(&process(1), 49) && !heap.ignores(&process(1), 50) && !heap.ignores(&process(2), 0));
        heap.forget_processes(&HashSet::from([process(1)]));
        assert!(!heap.tracks_some_again());
    }
}
