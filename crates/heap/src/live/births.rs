//! Sums in use by time of allocation.

use std::collections::HashMap;

use heapbpf_statistics::sums::SampleSums;
use heapbpf_statistics::weight::inclusion;

use super::Heap;

/// One row's sums of the blocks in use that were allocated after a mark (given by its index) and not after the next
/// one. In order of the marks; marks without blocks are left out.
pub type SumsByMark = Vec<(usize, SampleSums)>;

impl Heap {
    /// Sums in use by row number and by the mark after which the blocks were allocated. Blocks from before the first
    /// mark are left out, and so are those of ended processes. `marks_ns`: CLOCK_MONOTONIC, ascending.
    pub fn inuse_by_mark(&self, marks_ns: &[u64]) -> HashMap<usize, SumsByMark> {
        let mut all: HashMap<usize, SumsByMark> = HashMap::new();
        if marks_ns.is_empty() {
            return all;
        }
        for live in self.spaces.values().flat_map(HashMap::values) {
            let Some(mark) = marks_ns.partition_point(|mark| *mark < live.time_ns).checked_sub(1) else { continue };
            let Some(inclusion) = inclusion(live.trials, self.interval_of(live)) else { continue };
            let sums = all.entry(live.row as usize).or_default();
            let at = sums.binary_search_by_key(&mark, |(mark, _)| *mark).unwrap_or_else(|at| {
                sums.insert(at, (mark, SampleSums::default()));
                at
            });
            sums[at].1.record_included(live.size_bytes, live.offset, &inclusion);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{sample, stack};
    use super::*;

    #[test]
    fn the_spans_of_all_time_add_up_to_what_is_in_use() {
        let (mut heap, one) = (Heap::default(), stack());
        for id in 1..=100 {
            let mut sample = sample(id, 1, 100 * id, &one);
            sample.key.interval = 4096;
            heap.allocate(sample);
        }
        let by_mark = heap.inuse_by_mark(&[0, sample(50, 1, 1, &one).time_ns]);
        let mut sum = SampleSums::default();
        by_mark.values().flatten().for_each(|(_, sums)| sum.add(sums));
        let inuse = heap.snapshot(0, false).next().unwrap().inuse;
        assert!((sum.bytes / inuse.bytes - 1.0).abs() < 1e-12 && sum.samples == 100, "{sum:?} {inuse:?}");
        assert!((sum.bytes_variance / inuse.bytes_variance - 1.0).abs() < 1e-12);
    }
}
