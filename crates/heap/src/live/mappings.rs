//! Sampled mappings (`--mmap`): unmapped in parts, or found unmapped after records were lost.

use heapbpf_profile::model::LossBound;
use heapbpf_statistics::sums::SampleSums;
use sampler_ebpf::abi::ProcessKey;

use super::{Heap, LiveSample, PAGE, weight_of};

impl Heap {
    /// Removes an unmapped address range, as of `time_ns`. A mapping shrinks by the bytes that it loses and keeps its
    /// weight. It is freed when it loses the last one.
    pub fn unmap(&mut self, space: ProcessKey, start: u64, end: u64, time_ns: u64) {
        let Some(pieces) = self.mappings.get_mut(&space) else { return };
        let lost = pieces.unmap(start, end, time_ns);
        if !lost.is_empty() {
            self.note_peak();
            self.marks.note(time_ns);
        }
        for (id, bytes) in lost {
            if self.shrink(space, id, bytes, time_ns) {
                self.free(space, id, time_ns, false);
            }
        }
    }

    /// Takes bytes away from a mapping at `at_ns` (CLOCK_MONOTONIC). If it has no more than these, leaves it unchanged
    /// and returns `true`.
    fn shrink(&mut self, space: ProcessKey, id: u64, bytes: u64, at_ns: u64) -> bool {
        let Some(live) = self.spaces.get_mut(&space).and_then(|samples| samples.get_mut(&id)) else { return false };
        if live.size_bytes <= bytes {
            return true;
        }
        live.size_bytes -= bytes;
        // The offset was that of the whole mapping, and may lie in what is gone.
        live.offset = SampleSums::UNKNOWN_OFFSET;
        let lost = LiveSample { size_bytes: bytes, ..*live };
        live.shrunk_ns = live.shrunk_ns.max(at_ns);
        let weight = weight_of(lost.trials, self.interval_of(&lost));
        self.totals.inuse_bytes -= bytes as f64 * weight;
        self.note_shrunk(&lost, at_ns);
        false
    }

    /// Address spaces with sampled mappings.
    pub fn mapped_spaces(&self) -> impl Iterator<Item = &ProcessKey> {
        self.mappings.keys()
    }

    /// Removes sampled mappings that turned out to be unmapped although no record said so: those from up to `until_ns`
    /// that lie outside of `ranges` (in order of their starts). Returns the number of pieces and their bytes, in whole
    /// pages as the kernel unmaps them.
    pub fn keep_mapped(&mut self, space: ProcessKey, ranges: &[(u64, u64)], until_ns: u64) -> LossBound {
        let Some(pieces) = self.mappings.get_mut(&space) else { return LossBound::default() };
        let lost = pieces.keep_only(ranges, until_ns);
        // The total so far lacks unmappings, so it is not recorded as a peak.
        self.rising &= lost.is_empty();
        let by_ns = self.marks.last_event_ns();
        let mut found = LossBound::default();
        for (id, bytes) in lost {
            let samples = self.spaces.get(&space);
            // The brk heap is the only mapping that ends within a page.
            let in_pages = samples.and_then(|samples| samples.get(&id)).is_some_and(|live| live.address % PAGE == 0);
            let bytes_unmapped = if in_pages { bytes.next_multiple_of(PAGE) } else { bytes };
            found.add(&LossBound { samples: 1, sampled_bytes: bytes_unmapped });
            if self.shrink(space, id, bytes, by_ns)
                && let Some(live) = self.spaces.get_mut(&space).and_then(|samples| samples.remove(&id))
            {
                self.note_freed(&live, by_ns);
                self.subtract_live(&live);
            }
        }
        found
    }

    /// The remaining pieces of sampled mappings from up to `until_ns`: their number and bytes.
    pub fn mapped_by(&self, space: &ProcessKey, until_ns: u64) -> LossBound {
        let (samples, sampled_bytes) = self.mappings.get(space).map_or((0, 0), |pieces| pieces.mapped_by(until_ns));
        LossBound { samples, sampled_bytes }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use heapbpf_statistics::criterion::Criterion;
    use heapbpf_statistics::estimate::{NO_OFFSETS, Part, guaranteed_bytes};
    use heapbpf_statistics::growth::Growth;
    use heapbpf_unwind::raw::RawStack;

    use super::super::tests::{process, sample, stack};
    use super::*;
    use crate::sample::Sample;

    const R: u64 = 512 << 10;
    const SIZE: u64 = 1 << 20;
    const KEPT: u64 = 64 << 10;
    const MS: u64 = 1_000_000;

    /// A mapping of `SIZE` bytes at `2 * id * SIZE`.
    fn mapping(id: u64, time_ns: u64, stack: &Arc<RawStack>) -> Sample {
        let address = 2 * id * SIZE;
        let mut mapping = Sample { time_ns, address, offset: 400_000, mapped: true, ..sample(id, 1, SIZE, stack) };
        mapping.key.interval = R;
        mapping
    }

    #[test]
    fn a_mapping_that_shrank_has_no_offset_any_more() {
        let (mut heap, one) = (Heap::default(), stack());
        heap.allocate(mapping(1, 10, &one));
        heap.allocate(mapping(2, 20, &one));
        heap.unmap(process(1), 2 * SIZE + KEPT, 3 * SIZE, 30);
        let guaranteed =
            |sums: &SampleSums| guaranteed_bytes(&[Part::new(R, sums)], Criterion::Bytes, 0.95).map(|_| ());
        let sums = |heap: &mut Heap| heap.snapshot(40, false).map(|it| (it.row.alloc, it.inuse)).next().expect("a row");
        let (alloc, inuse) = sums(&mut heap);
        assert_eq!((inuse.sampled_bytes, inuse.unskipped()), (SIZE + KEPT, None));
        assert_eq!((guaranteed(&inuse), guaranteed(&alloc)), (Err(NO_OFFSETS), Ok(())));
        heap.unmap(process(1), 2 * SIZE, 3 * SIZE, 50);
        assert_eq!(sums(&mut heap).1.unskipped(), Some(SIZE - 400_000), "the other mapping is whole");
    }

    #[test]
    fn what_mappings_lose_is_in_their_growth() {
        let (mut heap, one) = (Heap::default(), stack());
        heap.allocate(mapping(1, 1_000 * MS, &one));
        // Growth is measured from here.
        heap.allocate(mapping(2, 2_000 * MS, &one));
        let before = heap.estimated().inuse_bytes;
        heap.allocate(mapping(3, 2_050 * MS, &one));
        heap.unmap(process(1), 2 * SIZE + SIZE / 2, 3 * SIZE, 2_100 * MS);
        heap.unmap(process(1), 6 * SIZE + KEPT, 7 * SIZE, 2_150 * MS);
        heap.unmap(process(1), 2 * SIZE + KEPT, 3 * SIZE, 2_200 * MS);
        let lost = heap.keep_mapped(process(1), &[(0, 4 * SIZE + KEPT), (6 * SIZE, 7 * SIZE)], 2_250 * MS);
        assert_eq!(lost, LossBound { samples: 1, sampled_bytes: SIZE - KEPT });
        let now_ns = 2_300 * MS;
        assert_eq!(heap.growth_since(now_ns), Some(2_000 * MS));
        let row = heap.snapshot(now_ns, false).map(|it| (it.row.alloc, it.inuse, it.growth)).next();
        let (alloc, inuse, growth) = row.expect("a row");
        let growth = growth.expect("a mark");
        let change = growth.kept.bytes - growth.freed.bytes;
        assert!((change / (inuse.bytes - before) - 1.0).abs() < 1e-9, "{growth:?}");
        assert!((heap.estimated().inuse_bytes / inuse.bytes - 1.0).abs() < 1e-9);
        assert_eq!((inuse.sampled_bytes, growth.kept.sampled_bytes), (3 * KEPT, KEPT));
        assert_eq!((growth.freed.samples, growth.freed.objects), (2, 0.0), "each mapping is one sample");
        assert!(Growth { kept: SampleSums::NONE, ..growth }.is_known(), "what was lost is stored");
        heap.unmap(process(1), 2 * SIZE, 5 * SIZE, 2_300 * MS);
        let freed = heap.snapshot(now_ns, false).next().and_then(|it| it.growth).expect("a mark").freed;
        assert_eq!((freed.samples, freed.sampled_bytes), (2, 2 * SIZE), "no mapping is counted twice");
        assert!((freed.objects / alloc.objects - 2.0 / 3.0).abs() < 1e-9);
    }
}
