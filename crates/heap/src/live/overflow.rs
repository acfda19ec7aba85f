//! Limits the number of rows. Beyond the limit, the stacks with the fewest samples share an overflow bucket: one row
//! per process and interval that holds their sums. No sum is lost, and the number of merged rows is reported.

use std::collections::HashMap;
use std::sync::Arc;

use heapbpf_profile::model::ByAddress;
use heapbpf_unwind::raw::{Completeness, RawStack, Reason, UnwinderKind};

use super::Heap;
use crate::sample::SampleKey;

/// State of the overflow buckets.
pub(super) struct Overflow {
    /// The stack that all buckets share; none before the first merge.
    stack: Option<ByAddress<RawStack>>,
    /// Rows merged into them so far.
    merged: u64,
    /// Number of rows at which the coldest rows are merged.
    limit: usize,
}

impl Default for Overflow {
    fn default() -> Self {
        Self { stack: None, merged: 0, limit: usize::MAX }
    }
}

impl Overflow {
    fn stack(&mut self) -> ByAddress<RawStack> {
        let new = || {
            ByAddress(Arc::new(RawStack {
                frames: Box::new([]),
                unwinder: UnwinderKind::Caller,
                completeness: Completeness::Truncated(Reason::OverflowBucket),
            }))
        };
        self.stack.get_or_insert_with(new).clone()
    }
}

impl Heap {
    /// Returns the same heap with a limit on the number of rows.
    #[must_use]
    pub const fn with_row_limit(mut self, limit: usize) -> Self {
        self.overflow.limit = limit;
        self
    }

    /// Rows merged into overflow buckets so far.
    pub const fn merged_rows(&self) -> u64 {
        self.overflow.merged
    }

    /// Called before a row is added. At the limit, merges the half of the rows with the fewest samples into overflow
    /// buckets. Among equal rows, the youngest are merged first. Overflow buckets stay.
    pub(super) fn merge_coldest_rows(&mut self) {
        let limit = self.overflow.limit;
        if self.rows.len() < limit {
            return;
        }
        let bucket = self.overflow.stack();
        let mut coldest: Vec<(u64, u64, u32)> = self
            .rows
            .iter()
            .filter(|(_, row)| row.key.stack != bucket)
            .map(|(number, row)| (row.alloc.samples, u64::MAX - row.first_ns, number as u32))
            .collect();
        coldest.sort_unstable();
        coldest.truncate(limit / 2);
        // Adds all buckets before it removes the first row, so that none of them gets the number of a removed row.
        let moved: HashMap<u32, u32> = coldest
            .iter()
            .map(|(_, _, number)| {
                let row = &self.rows[*number as usize];
                let SampleKey { process, interval, .. } = row.key;
                // Mappings and other blocks are not mixed.
                let function = if row.mapped { row.key.function } else { u16::MAX };
                let key = SampleKey { process, thread: "".into(), function, interval, stack: bucket.clone() };
                (*number, self.row_with(key, row.first_ns, row.mapped))
            })
            .collect();
        for (from, to) in &moved {
            let row = self.rows.remove(*from as usize);
            self.index.remove(&row.key);
            self.rows[*to as usize].add(&row);
        }
        for live in self.spaces.values_mut().flat_map(HashMap::values_mut) {
            live.row = moved.get(&live.row).copied().unwrap_or(live.row);
        }
        self.overflow.merged += moved.len() as u64;
        // Most of the remaining rows cannot be merged (many processes with few stacks each). Sorting again for every
        // new row would not help.
        if self.rows.len() > limit / 4 * 3 {
            self.overflow.limit = limit.saturating_mul(2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{process, sample};
    use super::*;

    fn stacks(count: usize) -> Vec<Arc<RawStack>> {
        let stack =
            || RawStack { frames: Box::new([]), unwinder: UnwinderKind::Caller, completeness: Completeness::Complete };
        std::iter::repeat_with(|| Arc::new(stack())).take(count).collect()
    }

    #[test]
    fn the_coldest_rows_share_a_bucket_and_sums_stay() {
        let mut heap = Heap::default().with_row_limit(100);
        let stacks = stacks(1_000);
        let (mut id, mut bytes) = (0, 0.0);
        for (i, stack) in stacks.iter().enumerate() {
            // The first ten are hot.
            for _ in 0..if i < 10 { 50 } else { 1 } {
                id += 1;
                bytes += 10.0;
                heap.allocate(sample(id, 1 + i as u32 % 2, 10, stack));
            }
        }
        assert!(heap.rows.len() <= 100, "{}", heap.rows.len());
        let kept = heap.rows.iter().filter(|(_, row)| row.alloc.samples == 50).count();
        assert_eq!(kept, 10, "hot rows stay");
        assert!(heap.merged_rows() > 800);
        let sums = |heap: &mut Heap| -> (f64, f64) {
            heap.snapshot(0, false)
                .map(|it| (it.row.alloc.bytes, it.inuse.bytes))
                .fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1))
        };
        assert_eq!(sums(&mut heap), (bytes, bytes));
        // Each process has its own bucket, and blocks of merged rows are freed like others.
        let of_first: f64 =
            heap.snapshot(0, false).filter(|it| it.row.key.process == process(1)).map(|it| it.row.alloc.bytes).sum();
        assert_eq!(of_first, bytes / 2.0);
        for id in 1..=id {
            heap.free(process(1), id, 0, false);
            heap.free(process(2), id, 0, false);
        }
        assert_eq!(sums(&mut heap), (bytes, 0.0));
        assert!(heap.rows.iter().all(|(_, row)| row.live == 0));
    }

    #[test]
    fn rows_that_cannot_be_merged_raise_the_limit() {
        let mut heap = Heap::default().with_row_limit(8);
        let one = &stacks(1)[0];
        for tgid in 1..=100 {
            heap.allocate(sample(u64::from(tgid), tgid, 10, one));
        }
        assert_eq!(heap.rows.len(), 100, "one for each process");
        assert_eq!(heap.overflow.limit, 128, "doubled whenever it was reached in vain");
        assert_eq!(heap.snapshot(0, false).map(|it| it.row.alloc.samples).sum::<u64>(), 100);
    }

    /// Number of rows, and how many of them are overflow buckets.
    fn counts(heap: &Heap) -> (usize, usize) {
        let bucket = heap.overflow.stack.as_ref();
        (heap.rows.len(), heap.rows.iter().filter(|(_, row)| Some(&row.key.stack) == bucket).count())
    }

    #[test]
    fn of_equal_rows_the_youngest_are_merged() {
        let mut heap = Heap::default().with_row_limit(8);
        let stacks = stacks(9);
        for (id, stack) in (1..).zip(&stacks) {
            heap.allocate(sample(id, 1, 10, stack));
        }
        // 4 of 8 were merged to add the ninth.
        assert_eq!((counts(&heap), heap.merged_rows()), ((6, 1), 4));
        let kept = |stack: &Arc<RawStack>| heap.rows.iter().any(|(_, row)| Arc::ptr_eq(&row.key.stack, stack));
        let kept: Vec<bool> = stacks.iter().map(kept).collect();
        assert_eq!(kept, [true, true, true, true, false, false, false, false, true]);
    }

    #[test]
    fn each_process_and_interval_has_a_bucket_which_stays() {
        let mut heap = Heap::default().with_row_limit(40);
        let stacks = stacks(400);
        for (id, stack) in (1..).zip(&stacks) {
            let mut sample = sample(id, 1 + (id % 2) as u32, 10, stack);
            sample.key.interval = 1 + id % 4 / 2;
            heap.allocate(sample);
        }
        let (rows, buckets) = counts(&heap);
        assert!(rows <= 40 && buckets == 4, "{rows} rows, {buckets} buckets");
        // Every stack had one sample. Those that are not rows are in the buckets.
        assert_eq!(heap.merged_rows() as usize, 400 - (rows - buckets));
        assert!(heap.rows.iter().all(|(number, row)| heap.index[&row.key] as usize == number));
        assert_eq!(heap.index.len(), rows);
    }
}
