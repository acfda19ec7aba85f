//! Reconciliation of a cut with the kernel's live map. The map is read right after the cut's moment T, and everything up to
//! T is taken in. A block leaves the map before the time of its free is read, and comes into it after that of its allocation
//! is. So what the map has from before T lives at T: if it is not known here, the record of its allocation was lost. And
//! what is known here and not in the map was freed by then: if no free record says so, it was lost.

use std::collections::{HashMap, HashSet};

use sampler_ebpf::abi::{FreeRecord, ProcessKey};

use super::{Heap, Sample};

/// Sampled blocks whose records were lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LostBlocks {
    /// How many.
    pub samples: u64,
    /// Bytes requested for them.
    pub bytes: u64,
}

impl LostBlocks {
    /// Adds others.
    pub fn add(&mut self, other: Self) {
        self.samples = self.samples.saturating_add(other.samples);
        self.bytes = self.bytes.saturating_add(other.bytes);
    }
}

/// What a reconciliation found out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Frees whose records had been lost.
    pub frees: u64,
    /// Allocations whose records had been lost, of blocks that live.
    pub allocations: u64,
}

/// What is known of the time between a cut and the reading of the live map, and after it.
#[derive(Debug, Default)]
pub struct Afterwards {
    /// Frees after the cut that were read so far.
    pub freed: Vec<FreeRecord>,
    /// Sampled allocations after the cut that were read so far.
    pub allocated: HashSet<u64>,
    /// Samples that lived all the same while the map did not have them: reallocs in flight take their blocks out.
    pub elsewhere: HashSet<u64>,
}

/// In place of a reading's number: the block was taken in while the map was read, or after.
const DURING: u8 = u8::MAX;

/// What is known from readings of the live map.
#[derive(Default)]
pub(super) struct Reconciliation {
    /// Number of the last reading: 1 to 254, and again from 1.
    reading: u8,
    is_open: bool,
    /// Allocations that the live map told of, by process.
    recovered: HashMap<ProcessKey, LostBlocks>,
}

impl Reconciliation {
    /// What says of a new block which reading had it.
    pub(super) const fn mark_of_new(&self) -> u8 {
        if self.is_open { DURING } else { 0 }
    }
}

impl Heap {
    /// The kernel's live map is about to be read.
    pub fn begin_reconciliation(&mut self) {
        let state = &mut self.reconciliation;
        state.reading = state.reading % (DURING - 1) + 1;
        state.is_open = true;
    }

    /// The live map has a block. Returns whether it is known here: if not, its record may still be on its way.
    pub fn observe(&mut self, space: &ProcessKey, id: u64) -> bool {
        let live = self.spaces.get_mut(space).and_then(|samples| samples.get_mut(&id));
        live.map(|live| live.seen = self.reconciliation.reading).is_some()
    }

    /// The cut could not be made: nothing can be told from the reading.
    pub fn abandon_reconciliation(&mut self) {
        self.reconciliation.is_open = false;
    }

    /// Finds out what lost records were about, when everything up to the cut has been taken in. `unknown` are blocks from
    /// before the cut that the map had and that were not known when they were observed; `there_now` is the sample that the
    /// map has at an address now. Returns also what may have lived at the cut all the same, by address space: it was freed
    /// before the map was read, and only the record of its free tells of it.
    pub fn reconcile(
        &mut self,
        unknown: Vec<Sample>,
        afterwards: Afterwards,
        there_now: impl Fn(&ProcessKey, u64) -> Option<u64>,
    ) -> (Found, HashMap<ProcessKey, LostBlocks>) {
        let Afterwards { freed, allocated, mut elsewhere } = afterwards;
        let mut unseen: HashMap<ProcessKey, LostBlocks> = HashMap::new();
        for free in freed {
            elsewhere.insert(free.sample);
            if !allocated.contains(&free.sample) && !self.knows(&free.space, free.sample) {
                let blocks = unseen.entry(free.space).or_default();
                blocks.add(LostBlocks { samples: 1, bytes: free.size_bytes });
            }
        }
        // What was taken in since the reading began may have come into the map since.
        let found = self.finish_reconciliation(unknown, |space, address, sample, during| {
            elsewhere.contains(&sample) || during && there_now(space, address) == Some(sample)
        });
        (found, unseen)
    }

    /// Everything up to the cut has been taken in. `unknown` are blocks from before the cut that were not known when they
    /// were observed: those that still are not are counted as allocated and in use. Known blocks that the map did not have
    /// are forgotten, unless `lives` says, by address space, address and sample, that they were somewhere else; it is also
    /// told whether the block was taken in since the reading began, and so may have come into the map after that.
    fn finish_reconciliation(
        &mut self,
        unknown: Vec<Sample>,
        mut lives: impl FnMut(&ProcessKey, u64, u64, bool) -> bool,
    ) -> Found {
        self.reconciliation.is_open = false;
        // A total that frees are missing from is no peak.
        self.rising = false;
        let unknown: Vec<Sample> =
            unknown.into_iter().filter(|sample| !self.observe(&sample.space, sample.id)).collect();
        let (reading, mut gone) = (self.reconciliation.reading, Vec::new());
        for (space, samples) in &mut self.spaces {
            samples.retain(|id, live| {
                // Mappings are not in that map: which parts of them are left is known here alone.
                let keeps = live.mapped || live.seen == reading || lives(space, live.address, *id, live.seen == DURING);
                if !keeps {
                    gone.push(*live);
                }
                keeps
            });
        }
        for live in &gone {
            self.forget(live);
        }
        let found = Found { frees: gone.len() as u64, allocations: unknown.len() as u64 };
        for sample in unknown {
            let recovered = self.reconciliation.recovered.entry(sample.process).or_default();
            recovered.add(LostBlocks { samples: 1, bytes: sample.size_bytes });
            self.allocate(sample);
        }
        found
    }

    /// Whether a sampled block lives, as far as is known.
    pub fn knows(&self, space: &ProcessKey, id: u64) -> bool {
        self.spaces.get(space).is_some_and(|samples| samples.contains_key(&id))
    }

    /// Allocations of a process that the live map told of after their records had been lost.
    pub fn recovered(&self, process: &ProcessKey) -> LostBlocks {
        self.reconciliation.recovered.get(process).copied().unwrap_or_default()
    }

    /// Drops what is known of processes that have ended.
    pub(super) fn forget_recovered(&mut self, ended: &HashSet<ProcessKey>) {
        self.reconciliation.recovered.retain(|process, _| !ended.contains(process));
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

    fn nowhere(_: &ProcessKey, _: u64, _: u64, _: bool) -> bool {
        false
    }

    #[test]
    fn what_the_map_lacks_was_freed_unless_it_is_elsewhere() {
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
        // 3 is being reallocated, 6 came into the map after it was read.
        let mut asked = Vec::new();
        let found = heap.finish_reconciliation(vec![], |space, address, id, during| {
            asked.push((*space, address, id, during));
            id == 3 || id == 6
        });
        assert_eq!((found, live_ids(&heap)), (Found { frees: 2, allocations: 0 }, vec![2, 3, 4, 6]));
        asked.sort_unstable();
        let of = |id: u64, during| (process(1), id * 4096, id, during);
        assert_eq!(asked, [of(1, false), of(3, false), of(5, true), of(6, true)]);
        // In the next reading, all of them are known from before.
        heap.begin_reconciliation();
        heap.observe(&process(1), 6);
        assert_eq!(heap.finish_reconciliation(vec![], nowhere).frees, 3);
        assert_eq!(live_ids(&heap), [6]);
    }

    #[test]
    fn what_the_map_has_and_nobody_told_of_is_counted() {
        let (mut heap, one) = (Heap::default(), stack());
        heap.allocate(sample(1, 1, 8, &one));
        heap.begin_reconciliation();
        let unknown: Vec<Sample> = (2..=3).map(|id| sample(id, 1, 100, &one)).collect();
        assert!(unknown.iter().all(|sample| !heap.observe(&sample.space, sample.id)) && heap.observe(&process(1), 1));
        // The record of 2 was on its way.
        heap.allocate(sample(2, 1, 100, &one));
        assert_eq!(heap.finish_reconciliation(unknown, nowhere), Found { frees: 0, allocations: 1 });
        assert_eq!(live_ids(&heap), [1, 2, 3]);
        assert_eq!(heap.recovered(&process(1)), LostBlocks { samples: 1, bytes: 100 });
        assert_eq!(heap.estimated().live_samples, 3);
        heap.free(process(1), 3, 0, false);
        assert_eq!(live_ids(&heap), [1, 2]);
        heap.forget_recovered(&HashSet::from([process(1)]));
        assert_eq!(heap.recovered(&process(1)), LostBlocks::default());
    }

    #[test]
    fn readings_are_told_apart_beyond_their_numbers() {
        let (mut heap, one) = (Heap::default(), stack());
        heap.allocate(sample(1, 1, 8, &one));
        for _ in 0..600 {
            heap.begin_reconciliation();
            heap.observe(&process(1), 1);
            assert_eq!(heap.finish_reconciliation(vec![], nowhere), Found::default());
        }
        heap.begin_reconciliation();
        assert_eq!(heap.finish_reconciliation(vec![], nowhere).frees, 1);
        heap.begin_reconciliation();
        heap.allocate(sample(2, 1, 8, &one));
        heap.abandon_reconciliation();
        heap.allocate(sample(3, 1, 8, &one));
        assert_eq!(live_ids(&heap), [2, 3]);
    }
}
