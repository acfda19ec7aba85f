//! Sampled mappings (`--mmap`): unmapped in parts, and found unmapped after records were lost.

use sampler_ebpf::abi::ProcessKey;

use super::{Heap, LostBlocks, PAGE, weight_of};

impl Heap {
    /// Removes an unmapped address range, as of `time_ns`. A mapping shrinks by the bytes that it loses and keeps its weight;
    /// when it loses the last one, it is freed.
    pub fn unmap(&mut self, space: ProcessKey, start: u64, end: u64, time_ns: u64) {
        let Some(pieces) = self.mappings.get_mut(&space) else { return };
        let lost = pieces.unmap(start, end, time_ns);
        if !lost.is_empty() {
            self.note_peak();
        }
        for (id, bytes) in lost {
            if self.shrink(space, id, bytes) {
                self.free(space, id, time_ns, false);
            }
        }
    }

    /// Takes bytes away from a mapping. Returns `true` instead if it has no more than these.
    fn shrink(&mut self, space: ProcessKey, id: u64, bytes: u64) -> bool {
        let Some(live) = self.spaces.get_mut(&space).and_then(|samples| samples.get_mut(&id)) else { return false };
        if live.size_bytes <= bytes {
            return true;
        }
        live.size_bytes -= bytes;
        let (trials, row) = (live.trials, live.row);
        self.totals.inuse_bytes -= bytes as f64 * weight_of(trials, self.rows[row as usize].key.interval);
        false
    }

    /// Address spaces with sampled mappings.
    pub fn mapped_spaces(&self) -> impl Iterator<Item = &ProcessKey> {
        self.mappings.keys()
    }

    /// Removes what is not mapped any more although no record told so: the sampled mappings from up to `until_ns` that lie
    /// outside of `ranges`, which are in order of their starts. Returns how many pieces that were, and their bytes, in whole
    /// pages as the kernel unmaps them.
    pub fn keep_mapped(&mut self, space: ProcessKey, ranges: &[(u64, u64)], until_ns: u64) -> LostBlocks {
        let Some(pieces) = self.mappings.get_mut(&space) else { return LostBlocks::default() };
        let lost = pieces.keep_only(ranges, until_ns);
        // The total so far lacks unmappings, so it is not recorded as a peak.
        self.rising &= lost.is_empty();
        let mut found = LostBlocks::default();
        for (id, bytes) in lost {
            let samples = self.spaces.get(&space);
            // The heap of brk is the only mapping that ends within a page.
            let in_pages = samples.and_then(|samples| samples.get(&id)).is_some_and(|live| live.address % PAGE == 0);
            let bytes_unmapped = if in_pages { bytes.next_multiple_of(PAGE) } else { bytes };
            found.add(LostBlocks { samples: 1, bytes: bytes_unmapped });
            if self.shrink(space, id, bytes)
                && let Some(live) = self.spaces.get_mut(&space).and_then(|samples| samples.remove(&id))
            {
                self.subtract_live(&live);
            }
        }
        found
    }

    /// What is left of the sampled mappings from up to `until_ns`: number of pieces, and their bytes.
    pub fn mapped_by(&self, space: &ProcessKey, until_ns: u64) -> LostBlocks {
        let (samples, bytes) = self.mappings.get(space).map_or((0, 0), |pieces| pieces.mapped_by(until_ns));
        LostBlocks { samples, bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{process, sample, stack};
    use super::*;
    use crate::heap::sample::Sample;

    #[test]
    fn what_is_not_mapped_any_more_is_gone_in_parts_and_without_an_age() {
        let (mut heap, one) = (Heap::default(), stack());
        for (id, pages) in [(1, 4), (2, 1), (3, 2)] {
            let (address, time_ns) = (id * 16 * PAGE, 10 * id);
            heap.allocate(Sample { address, mapped: true, time_ns, ..sample(id, 1, pages * PAGE - 8, &one) });
        }
        // Of the first, the middle is gone; the second is gone; the third came later.
        let ranges = [(0, 17 * PAGE), (18 * PAGE, 21 * PAGE)];
        let found = heap.keep_mapped(process(1), &ranges, 25);
        assert_eq!(found, LostBlocks { samples: 2, bytes: 2 * PAGE });
        assert_eq!(heap.estimated().inuse_bytes, (3 * PAGE - 8 + 2 * PAGE - 8) as f64);
        assert_eq!(heap.estimated().live_samples, 2);
        assert_eq!(heap.mapped_by(&process(1), 25), LostBlocks { samples: 2, bytes: 3 * PAGE - 8 });
        assert_eq!(heap.mapped_by(&process(1), 30).bytes, 5 * PAGE - 16);
        assert_eq!(heap.keep_mapped(process(1), &ranges, 25), LostBlocks::default());
        assert_eq!(heap.keep_mapped(process(2), &[], 25), LostBlocks::default());
        // The record was not lost after all.
        heap.unmap(process(1), 32 * PAGE, 33 * PAGE, 25);
        assert_eq!(heap.estimated().live_samples, 2);
        assert_eq!(heap.mapped_spaces().collect::<Vec<_>>(), [&process(1)]);
    }
}
