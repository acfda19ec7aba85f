//! Bounded memory under any number of stacks: beyond so many rows the coldest are put together, sums and all, in one row
//! for each process and interval. Nothing is dropped, and how many there were is told.

use std::collections::HashMap;
use std::sync::Arc;

use super::{Heap, HeapRow, RowKey};
use crate::unwind::raw::{Completeness, RawStack, Reason, UnwinderKind};

/// What is known of rows that were put together.
pub(super) struct Cold {
    /// Their stack.
    stack: Option<Arc<RawStack>>,
    /// How many rows went.
    merged: u64,
    /// Rows at which there are too many.
    limit: usize,
}

impl Default for Cold {
    fn default() -> Self {
        Self { stack: None, merged: 0, limit: usize::MAX }
    }
}

impl Heap {
    /// The same with a bound on the rows that are told apart: by stack, process, thread name, function and interval.
    #[must_use]
    pub const fn with_most_rows(mut self, most: usize) -> Self {
        self.cold.limit = most;
        self
    }

    /// Rows that were put together with others up to now.
    pub const fn merged_rows(&self) -> u64 {
        self.cold.merged
    }

    /// Before a row is added: if there are too many, the half with the fewest samples is put together (the younger ones
    /// first among equals). Rows that stand for others already stay, and those that the open time window has seen.
    pub(super) fn make_room(&mut self) {
        let limit = self.cold.limit;
        if self.rows.len() < limit {
            return;
        }
        let together = self.cold.stack.get_or_insert_with(|| {
            Arc::new(RawStack {
                frames: Box::new([]),
                unwinder: UnwinderKind::Caller,
                completeness: Completeness::Cut(Reason::PutTogether),
            })
        });
        let together = Arc::clone(together);
        let mut cold: Vec<(u64, u64, u32)> = self
            .rows
            .iter()
            .filter(|(number, row)| !Arc::ptr_eq(&row.stack, &together) && !self.windows.is_open_for(*number as u32))
            .map(|(number, row)| (row.alloc.samples, u64::MAX - row.first_ns, number as u32))
            .collect();
        cold.sort_unstable();
        cold.truncate(limit / 2);
        // All rows that stay are there before the first one goes: no number is used again meanwhile.
        let moved: HashMap<u32, u32> = cold
            .iter()
            .map(|(_, _, number)| {
                let row = &self.rows[*number as usize];
                let row = HeapRow::new(row.process, "".into(), u16::MAX, row.interval, &together, row.first_ns);
                (*number, self.row_like(row))
            })
            .collect();
        for (from, to) in &moved {
            let row = self.rows.remove(*from as usize);
            self.index.remove(&RowKey::of(&row));
            self.windows.forget(*from);
            self.rows[*to as usize].take_in(&row);
        }
        for live in self.spaces.values_mut().flat_map(HashMap::values_mut) {
            live.row = moved.get(&live.row).copied().unwrap_or(live.row);
        }
        self.cold.merged += moved.len() as u64;
        // Many processes with few stacks each: then this is what there is to keep, and to sort again each time is no use.
        if self.rows.len() > limit / 4 * 3 {
            self.cold.limit = limit.saturating_mul(2);
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
    fn the_coldest_rows_are_put_together_and_sums_stay() {
        let mut heap = Heap::default().with_most_rows(100);
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
        // Each process keeps its own, and blocks of rows that went are freed like others.
        let of_first: f64 =
            heap.snapshot(0, false).filter(|it| it.row.process == process(1)).map(|it| it.row.alloc.bytes).sum();
        assert_eq!(of_first, bytes / 2.0);
        for id in 1..=id {
            heap.free(process(1), id, 0, false);
            heap.free(process(2), id, 0, false);
        }
        assert_eq!(sums(&mut heap), (bytes, 0.0));
        assert!(heap.rows.iter().all(|(_, row)| row.live == 0));
    }

    #[test]
    fn rows_that_cannot_be_put_together_raise_the_limit() {
        let mut heap = Heap::default().with_most_rows(8);
        let one = &stacks(1)[0];
        for tgid in 1..=100 {
            heap.allocate(sample(u64::from(tgid), tgid, 10, one));
        }
        assert_eq!(heap.rows.len(), 100, "one for each process");
        assert_eq!(heap.snapshot(0, false).map(|it| it.row.alloc.samples).sum::<u64>(), 100);
    }
}
