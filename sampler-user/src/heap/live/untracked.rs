//! Address spaces whose frees are no longer tracked: their blocks are dropped from the figures in use, and later allocations
//! count as allocated only.

use std::collections::HashSet;

use sampler_ebpf::abi::ProcessKey;

use super::{Heap, LiveSample, weight_of};
use heapbpf_statistics::sums::SampleSums;

/// Where frees are not tracked.
#[derive(Default)]
pub(super) struct Untracked {
    /// Address spaces whose frees are not tracked, and processes that allocated there.
    processes: HashSet<ProcessKey>,
    /// Address space and address of blocks sampled there since the last call of [`Heap::take_untracked_blocks`].
    blocks: Vec<(ProcessKey, u64)>,
}

impl Untracked {
    /// Whether the frees of an address space are not tracked. If so, the block and the process that allocated it are noted.
    pub(super) fn note_block(&mut self, space: ProcessKey, process: ProcessKey, address: u64) -> bool {
        let is_untracked = self.processes.contains(&space);
        if is_untracked {
            self.processes.insert(process);
            self.blocks.push((space, address));
        }
        is_untracked
    }
}

impl Heap {
    /// Estimated bytes in use in an address space.
    pub fn inuse_bytes_of(&self, space: &ProcessKey) -> f64 {
        let bytes = |live: &LiveSample| live.size_bytes as f64 * weight_of(live.trials, self.interval_of(live));
        self.spaces.get(space).map_or(0.0, |samples| samples.values().map(bytes).sum())
    }

    /// Stops tracking frees in an address space: its blocks are dropped, and later ones count as allocated only. Returns the
    /// addresses of the dropped blocks.
    pub fn stop_tracking(&mut self, space: ProcessKey) -> Vec<u64> {
        self.note_peak();
        self.untracked.processes.insert(space);
        self.mappings.remove(&space);
        let samples = self.spaces.remove(&space).unwrap_or_default();
        for live in samples.values() {
            self.subtract_live(live);
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
        samples.into_values().map(|live| live.address).collect()
    }

    /// Whether the memory in use by a process is unknown because its frees are not tracked.
    pub fn is_untracked(&self, process: &ProcessKey) -> bool {
        self.untracked.processes.contains(process)
    }

    /// Address space and address of the blocks sampled in untracked address spaces since the last call.
    pub fn take_untracked_blocks(&mut self) -> Vec<(ProcessKey, u64)> {
        std::mem::take(&mut self.untracked.blocks)
    }

    /// Drops what is kept for each of these processes, which have ended.
    pub fn forget_processes(&mut self, ended: &HashSet<ProcessKey>) {
        self.untracked.processes.retain(|process| !ended.contains(process));
        self.reconciliation.forget_processes(ended);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{process, sample, stack};
    use super::super::{AfterCut, LostRecords};
    use super::*;
    use crate::heap::sample::Sample;

    #[test]
    fn after_tracking_stops_nothing_is_in_use_and_all_is_allocated() {
        let (mut heap, one) = (Heap::default(), stack());
        for id in 1..=4 {
            heap.allocate(sample(id, 1 + (id % 2) as u32, 100, &one));
        }
        // A vfork child, in its parent's address space.
        heap.allocate(Sample { space: process(1), ..sample(5, 3, 100, &one) });
        assert_eq!((heap.inuse_bytes_of(&process(1)), heap.inuse_bytes_of(&process(2))), (300.0, 200.0));
        let mut addresses = heap.stop_tracking(process(1));
        addresses.sort_unstable();
        assert_eq!(addresses, [2, 4, 5].map(|id| id * 4096));
        assert_eq!([1, 2, 3].map(|tgid| heap.is_untracked(&process(tgid))), [true, false, true]);
        assert_eq!((heap.estimated().inuse_bytes, heap.estimated().live_samples), (200.0, 2));

        heap.allocate(sample(6, 1, 100, &one));
        heap.allocate(sample(7, 2, 100, &one));
        heap.allocate(Sample { space: process(1), ..sample(8, 4, 100, &one) });
        assert_eq!(heap.take_untracked_blocks(), [(process(1), 6 * 4096), (process(1), 8 * 4096)]);
        assert!(heap.take_untracked_blocks().is_empty() && heap.is_untracked(&process(4)));
        heap.free(process(1), 2, 90_000, false);
        let mut rows: Vec<_> = heap
            .snapshot(0, false)
            .map(|it| (it.row.key.process.tgid, it.row.alloc.samples, it.inuse.samples, it.peak.samples))
            .collect();
        rows.sort_unstable();
        // The peak is that of the tracked processes.
        assert_eq!(rows, [(1, 3, 0, 0), (2, 3, 3, 3), (3, 1, 0, 0), (4, 1, 0, 0)]);
        heap.forget_processes(&HashSet::from([process(1)]));
        assert!(!heap.is_untracked(&process(1)) && heap.is_untracked(&process(3)));
    }

    #[test]
    fn mappings_of_an_untracked_space_are_dropped() {
        let (mut heap, one) = (Heap::default(), stack());
        let mapping = |id| Sample { address: 1 << 20, mapped: true, ..sample(id, 1, 8192, &one) };
        heap.allocate(mapping(1));
        assert_eq!(heap.stop_tracking(process(1)), [1 << 20]);
        heap.allocate(mapping(2));
        heap.unmap(process(1), 0, u64::MAX, 9000);
        assert!(heap.mappings.is_empty() && heap.spaces.is_empty());
        assert_eq!((heap.estimated().samples, heap.estimated().live_samples), (2, 0));
        assert_eq!(heap.estimated().inuse_bytes, 0.0);
    }

    #[test]
    fn an_untracked_process_holds_nothing_at_exit() {
        let (mut heap, one) = (Heap::new(true), stack());
        heap.allocate(sample(1, 1, 100, &one));
        heap.stop_tracking(process(1));
        heap.allocate(sample(2, 1, 100, &one));
        assert_eq!(heap.end(process(1), |address| panic!("nothing is live at {address}")), 0);
        let rows: Vec<_> = heap
            .snapshot(0, false)
            .map(|it| (it.row.alloc.samples, it.row.untracked, it.inuse.samples, it.at_exit.samples))
            .collect();
        // The first sample was tracked.
        assert_eq!(rows, [(2, 1, 0, 0)]);
        let (retired, held) = heap.retire(&HashSet::from([process(1)]));
        assert_eq!((retired.len(), held.len()), (1, 0));
    }

    #[test]
    fn the_next_peak_is_compared_with_that_of_the_tracked_processes() {
        let (mut heap, one, two) = (Heap::default(), stack(), stack());
        heap.allocate(sample(1, 1, 10_000, &one));
        heap.allocate(sample(2, 2, 100, &two));
        heap.stop_tracking(process(1));
        let peaks = |heap: &mut Heap| -> Vec<f64> { heap.snapshot(0, false).map(|it| it.peak.bytes).collect() };
        assert_eq!(peaks(&mut heap), [0.0, 100.0]);
        // 300 bytes are fewer than the 10,100 of the peak with process 1.
        heap.allocate(sample(3, 2, 200, &two));
        assert_eq!(peaks(&mut heap), [0.0, 300.0]);
    }

    #[test]
    fn reconciliation_adds_nothing_to_an_untracked_space() {
        let (mut heap, one) = (Heap::default(), stack());
        heap.stop_tracking(process(1));
        heap.begin_reconciliation();
        assert!(!heap.observe(&process(1), 1));
        let (lost, unseen) = heap.reconcile(vec![sample(1, 1, 50, &one)], AfterCut::default(), |_, _| None);
        assert_eq!((lost, unseen.len()), (LostRecords { frees: 0, allocations: 1 }, 0));
        assert_eq!((heap.estimated().alloc_bytes, heap.estimated().inuse_bytes), (50.0, 0.0));
        assert_eq!(heap.take_untracked_blocks(), [(process(1), 4096)]);
        assert_eq!(heap.recovered(&process(1)).samples, 1);
        heap.forget_processes(&HashSet::from([process(1)]));
        assert_eq!(heap.recovered(&process(1)).samples, 0);
    }
}
