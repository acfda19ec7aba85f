//! Reconciliation of the heap with the kernel's live map at a cut. It finds the blocks whose records were lost.
//!
//! The map is scanned right after the moment T of the cut, and every record up to T is processed. The BPF side removes
//! a block from the map before it reads the time of the free, and adds a block after it has read the time of the
//! allocation. So a block that is in the map with a time before T is live at T: if it is unknown here, the record of
//! its allocation was lost. A block that is known here and missing from the map was freed by T: if no record reported
//! the free, that record was lost.

use std::collections::{HashMap, HashSet};

use heapbpf_profile::model::LossBound;
use sampler_ebpf::abi::{FreeRecord, ProcessKey};

use super::Heap;
use crate::event::{Event, decode};
use crate::sample::Sample;

/// Numbers of lost records that a reconciliation found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LostRecords {
    /// Records of frees.
    pub frees: u64,
    /// Records of allocations whose blocks are live.
    pub allocations: u64,
}

/// What is known about the time after a cut, when the live map is scanned.
#[derive(Debug, Default)]
pub struct AfterCut {
    /// Frees after the cut that have been read so far.
    pub freed: Vec<FreeRecord>,
    /// Samples allocated after the cut that have been read so far.
    pub allocated: HashSet<u64>,
    /// Samples that were live although the map did not have them: a realloc in flight takes its block out of the map.
    pub outside_map: HashSet<u64>,
    /// Address ranges that were unmapped after the cut (start and end), by address space.
    pub unmapped: HashMap<ProcessKey, Vec<(u64, u64)>>,
    /// Processes that ended or executed a new program after the cut.
    pub ended: HashSet<ProcessKey>,
}

impl AfterCut {
    /// Collects what the records after the cut say.
    pub fn of<'a>(records: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut after = Self::default();
        for record in records {
            match decode(record) {
                Some(Event::Free(record)) => after.freed.push(record),
                Some(Event::Allocation(record)) => drop(after.allocated.insert(record.sample)),
                Some(Event::Unmap(record)) => {
                    after.unmapped.entry(record.space).or_default().push((record.start, record.end));
                }
                Some(Event::Exec(record) | Event::Exit(record)) => drop(after.ended.insert(record.process)),
                _ => {}
            }
        }
        after
    }
}

/// Replaces the scan number of a block that was added during a scan.
pub(super) const DURING_SCAN: u8 = u8::MAX;

/// State of the reconciliation.
#[derive(Default)]
pub(super) struct Reconciliation {
    /// Number of the last scan, from 1 to 254 and then from 1 again.
    scan: u8,
    is_open: bool,
    /// Allocations found in the live map after their records were lost, by process.
    recovered: HashMap<ProcessKey, LossBound>,
}

impl Reconciliation {
    /// The mark of a block that is added now, in place of a scan number.
    pub(super) const fn mark_of_new_block(&self) -> u8 {
        if self.is_open { DURING_SCAN } else { 0 }
    }

    /// Drops the state of these processes.
    pub(super) fn forget_processes(&mut self, ended: &HashSet<ProcessKey>) {
        self.recovered.retain(|process, _| !ended.contains(process));
    }
}

impl Heap {
    /// Begins a reconciliation. Called before the kernel's live map is scanned.
    pub fn begin_reconciliation(&mut self) {
        let state = &mut self.reconciliation;
        state.scan = state.scan % (DURING_SCAN - 1) + 1;
        state.is_open = true;
    }

    /// Records that the scan found a block. Returns whether the block is known. If not, its record may not have been
    /// read yet.
    pub fn observe(&mut self, space: &ProcessKey, id: u64) -> bool {
        let live = self.spaces.get_mut(space).and_then(|samples| samples.get_mut(&id));
        live.map(|live| live.seen_in_scan = self.reconciliation.scan).is_some()
    }

    /// Ends a reconciliation without using the scan, because the cut failed.
    pub fn abandon_reconciliation(&mut self) {
        self.reconciliation.is_open = false;
    }

    /// Adds and removes the blocks whose records were lost. Called after every record up to the cut has been processed.
    ///
    /// `unknown`: blocks from before the cut that were in the map and unknown when they were observed. `sample_at`:
    /// returns the sample that the map has at an address now. Also returns, by address space, blocks that may have been
    /// live at the cut although the figures lack them: they were freed before the map was scanned, and only the record
    /// of the free remains.
    pub fn reconcile(
        &mut self,
        unknown: Vec<Sample>,
        after: AfterCut,
        sample_at: impl Fn(&ProcessKey, u64) -> Option<u64>,
    ) -> (LostRecords, HashMap<ProcessKey, LossBound>) {
        let AfterCut { freed, allocated, mut outside_map, .. } = after;
        let mut unseen: HashMap<ProcessKey, LossBound> = HashMap::new();
        for free in freed {
            outside_map.insert(free.sample);
            if !allocated.contains(&free.sample) && !self.knows(&free.space, free.sample) {
                let blocks = unseen.entry(free.space).or_default();
                blocks.add(&LossBound { samples: 1, sampled_bytes: free.size_bytes });
            }
        }
        // A block that was added during the scan may have entered the map after the scan passed its place.
        let lost = self.finish_reconciliation(unknown, |space, address, sample, during_scan| {
            outside_map.contains(&sample) || during_scan && sample_at(space, address) == Some(sample)
        });
        (lost, unseen)
    }

    /// Adds the `unknown` blocks that are still unknown. Removes the known blocks that the scan did not find, unless
    /// `is_live` says that they are live. Its arguments are the address space, the address, the sample, and whether the
    /// block was added during the scan.
    fn finish_reconciliation(
        &mut self,
        unknown: Vec<Sample>,
        mut is_live: impl FnMut(&ProcessKey, u64, u64, bool) -> bool,
    ) -> LostRecords {
        self.reconciliation.is_open = false;
        // The total so far lacks frees, so it is not recorded as a peak.
        self.rising = false;
        let unknown: Vec<Sample> =
            unknown.into_iter().filter(|sample| !self.observe(&sample.space, sample.id)).collect();
        let (scan, mut freed) = (self.reconciliation.scan, Vec::new());
        for (space, samples) in &mut self.spaces {
            samples.retain(|id, live| {
                // The kernel's live map does not contain mappings.
                let keeps = live.mapped
                    || live.seen_in_scan == scan
                    || is_live(space, live.address, *id, live.seen_in_scan == DURING_SCAN);
                if !keeps {
                    freed.push(*live);
                }
                keeps
            });
        }
        let by_ns = self.marks.last_event_ns();
        for live in &freed {
            self.note_freed(live, by_ns);
            self.subtract_live(live);
        }
        let lost = LostRecords { frees: freed.len() as u64, allocations: unknown.len() as u64 };
        for sample in unknown {
            let recovered = self.reconciliation.recovered.entry(sample.key.process).or_default();
            recovered.add(&LossBound { samples: 1, sampled_bytes: sample.size_bytes });
            self.allocate(sample);
        }
        lost
    }

    /// Whether a sample is known and live.
    pub fn knows(&self, space: &ProcessKey, id: u64) -> bool {
        self.spaces.get(space).is_some_and(|samples| samples.contains_key(&id))
    }

    /// Allocations of a process that were found in the live map after their records were lost.
    pub fn recovered(&self, process: &ProcessKey) -> LossBound {
        self.reconciliation.recovered.get(process).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{process, sample, stack};
    use super::*;

    fn live_ids(heap: &Heap) -> Vec<u64> {
        let mut ids: Vec<u64> = heap.spaces.values().flat_map(|samples| samples.keys().copied()).collect();
        ids.sort_unstable();
        ids
    }

    fn not_live(_: &ProcessKey, _: u64, _: u64, _: bool) -> bool {
        false
    }

    #[test]
    fn blocks_missing_from_the_map_were_freed_unless_they_are_live() {
        let (mut heap, one) = (Heap::default(), stack());
        for id in 1..=4 {
            heap.allocate(sample(id, 1, 8, &one));
        }
        heap.begin_reconciliation();
        assert!(heap.observe(&process(1), 2) && heap.observe(&process(1), 4));
        assert!(!heap.observe(&process(1), 99) && !heap.observe(&process(2), 1));
        for id in 5..=6 {
            heap.allocate(sample(id, 1, 8, &one));
        }
        // 3 is being reallocated; 6 entered the map after the scan passed its place.
        let mut asked = Vec::new();
        let lost = heap.finish_reconciliation(vec![], |space, address, id, during| {
            asked.push((*space, address, id, during));
            id == 3 || id == 6
        });
        assert_eq!((lost, live_ids(&heap)), (LostRecords { frees: 2, allocations: 0 }, vec![2, 3, 4, 6]));
        asked.sort_unstable();
        let of = |id: u64, during| (process(1), id * 4096, id, during);
        assert_eq!(asked, [of(1, false), of(3, false), of(5, true), of(6, true)]);
        // To the next scan, all of them are older blocks.
        heap.begin_reconciliation();
        heap.observe(&process(1), 6);
        assert_eq!(heap.finish_reconciliation(vec![], not_live).frees, 3);
        assert_eq!(live_ids(&heap), [6]);
    }

    #[test]
    fn blocks_in_the_map_without_a_record_are_added() {
        let (mut heap, one) = (Heap::default(), stack());
        heap.allocate(sample(1, 1, 8, &one));
        heap.begin_reconciliation();
        let unknown: Vec<Sample> = (2..=3).map(|id| sample(id, 1, 100, &one)).collect();
        assert!(unknown.iter().all(|sample| !heap.observe(&sample.space, sample.id)) && heap.observe(&process(1), 1));
        // The record of 2 is read late.
        heap.allocate(sample(2, 1, 100, &one));
        assert_eq!(heap.finish_reconciliation(unknown, not_live), LostRecords { frees: 0, allocations: 1 });
        assert_eq!(live_ids(&heap), [1, 2, 3]);
        assert_eq!(heap.recovered(&process(1)), LossBound { samples: 1, sampled_bytes: 100 });
        assert_eq!(heap.estimated().live_samples, 3);
        heap.free(process(1), 3, 0, false);
        assert_eq!(live_ids(&heap), [1, 2]);
        heap.forget_processes(&HashSet::from([process(1)]));
        assert_eq!(heap.recovered(&process(1)), LossBound::default());
    }

    #[test]
    fn records_after_the_cut_say_what_happened_since() {
        use sampler_ebpf::abi::{AllocationRecord, ProcessRecord, UnmapRecord, kind};
        let free = FreeRecord { kind: kind::FREE, sample: 1, ..Default::default() };
        let of_process = |kind, tgid| ProcessRecord { kind, process: process(tgid), ..Default::default() };
        let unmap = UnmapRecord { kind: kind::UNMAP, space: process(5), start: 6, end: 7, ..Default::default() };
        let records = [
            Event::Free(free),
            Event::Allocation(AllocationRecord { kind: kind::ALLOCATION, sample: 2, ..Default::default() }),
            Event::Exec(of_process(kind::EXEC, 3)),
            Event::Exit(of_process(kind::EXIT, 4)),
            Event::Unmap(unmap),
            Event::Fork(of_process(kind::FORK, 8)),
        ]
        .map(Event::to_bytes);
        let after = AfterCut::of(records.iter().map(Vec::as_slice));
        assert_eq!((after.freed, after.allocated), (vec![free], HashSet::from([2])));
        assert_eq!(after.ended, HashSet::from([process(3), process(4)]));
        assert_eq!(after.unmapped, HashMap::from([(process(5), vec![(6, 7)])]));
    }

    #[test]
    fn scan_numbers_may_wrap_around() {
        let (mut heap, one) = (Heap::default(), stack());
        heap.allocate(sample(1, 1, 8, &one));
        for _ in 0..600 {
            heap.begin_reconciliation();
            heap.observe(&process(1), 1);
            assert_eq!(heap.finish_reconciliation(vec![], not_live), LostRecords::default());
        }
        heap.begin_reconciliation();
        assert_eq!(heap.finish_reconciliation(vec![], not_live).frees, 1);
        heap.begin_reconciliation();
        heap.allocate(sample(2, 1, 8, &one));
        heap.abandon_reconciliation();
        heap.allocate(sample(3, 1, 8, &one));
        assert_eq!(live_ids(&heap), [2, 3]);
    }
}
