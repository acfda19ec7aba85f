//! Joins records of the events ring with their stack copies, which arrive through a separate ring.

use std::collections::HashMap;
use std::sync::Arc;

use heapbpf_heap::event::{Event, decode};
use heapbpf_unwind::raw::RawStack;
use sampler_ebpf::abi::stack_kind;

use super::queue::RecordQueue;

/// Limit on records read ahead, and on stacks that wait for their records. Everything beyond it stays in the rings,
/// where it may be lost: a cut must process all waiting records before it is complete.
pub const MOST_WAITING: usize = 1 << 18;

/// How long a record waits for its stack copy. After that, the copy counts as lost.
pub const LONGEST_WAIT_NS: u64 = 1_000_000_000;

/// A record, `None` if it could not be decoded; and if it is an allocation, its stack, if the copy arrived.
pub type Joined = (Option<Event>, Option<Arc<RawStack>>);

/// Records in order of time, and stacks that arrived ahead of their records.
#[derive(Default)]
pub struct Join {
    /// Queue of records.
    pub queue: RecordQueue,
    arrived: HashMap<u64, Arc<RawStack>>,
}

impl Join {
    /// Adds the stack of a sample.
    pub fn arrive(&mut self, sample: u64, stack: Arc<RawStack>) {
        // Every stack has a record. But a stack that arrives after its record stopped waiting would stay here forever.
        if self.arrived.len() >= MOST_WAITING {
            self.arrived.clear();
        }
        self.arrived.insert(sample, stack);
    }

    /// Number of stacks that arrived ahead of their records.
    pub fn stacks_ahead(&self) -> usize {
        self.arrived.len()
    }

    /// The next record in order. `None` if there is none, or if its stack may still arrive: the stacks ring hands out
    /// nothing past a record that another CPU is still writing. `drained`: whether the stacks ring has handed out all
    /// that it can for now. `now_ns`: the CLOCK_MONOTONIC time, called only if needed.
    pub fn next(&mut self, drained: bool, now_ns: impl FnOnce() -> u64) -> Option<Joined> {
        let (event, mut stack) = (decode(&self.queue.front()?.1), None);
        if let Some(Event::Allocation(record)) = &event {
            stack = self.arrived.remove(&record.sample);
            let expected = stack.is_none() && record.stack_kind == stack_kind::COPIED;
            if expected && !(drained && now_ns().saturating_sub(record.time_ns) > LONGEST_WAIT_NS) {
                return None;
            }
        }
        self.queue.pop_front();
        Some((event, stack))
    }

    /// Shrinks the memory of the queue and of waiting stacks to a capacity of this many records.
    pub fn shrink_to(&mut self, records: usize) {
        self.queue.shrink_to(records);
        self.arrived.shrink_to(records);
    }
}

#[cfg(test)]
mod tests {
    use sampler_ebpf::abi::{AllocationRecord, FreeRecord, kind};

    use super::*;

    const SAMPLED_NS: u64 = 10;

    fn allocation(sample: u64, stack_kind: u32) -> Event {
        Event::Allocation(AllocationRecord {
            kind: kind::ALLOCATION,
            sample,
            time_ns: SAMPLED_NS + sample,
            stack_kind,
            ..Default::default()
        })
    }

    fn free(sample: u64) -> Event {
        Event::Free(FreeRecord { kind: kind::FREE, sample, time_ns: SAMPLED_NS + sample, ..Default::default() })
    }

    fn join(events: &[Event]) -> Join {
        let mut join = Join::default();
        join.queue.read_up_to(|| (1_000, 1));
        events.iter().for_each(|event| join.queue.push(event.to_bytes().into()));
        join.queue.has_read_up_to(1);
        join
    }

    /// Sample ID of the next record, and whether it has a stack.
    fn next(join: &mut Join, drained: bool, now_ns: u64) -> Option<(u64, bool)> {
        match join.next(drained, || now_ns)? {
            (Some(Event::Allocation(record)), stack) => Some((record.sample, stack.is_some())),
            (Some(Event::Free(record)), None) => Some((record.sample, false)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_record_waits_for_its_stack_and_everything_after_it_waits_too() {
        let mut join = join(&[allocation(1, stack_kind::COPIED), free(2), allocation(3, stack_kind::COPIED)]);
        assert_eq!(next(&mut join, true, SAMPLED_NS + 5), None);
        join.arrive(3, Arc::new(RawStack::lost()));
        assert_eq!(next(&mut join, true, SAMPLED_NS + 5), None, "the order of time is kept");
        join.arrive(1, Arc::new(RawStack::lost()));
        let all: Vec<_> = std::iter::from_fn(|| next(&mut join, true, SAMPLED_NS + 5)).collect();
        assert_eq!(all, [(1, true), (2, false), (3, true)]);
        assert_eq!(join.stacks_ahead(), 0);
    }

    #[test]
    fn a_stack_that_does_not_come_is_done_without_only_when_its_ring_is_drained() {
        let late = SAMPLED_NS + 1 + LONGEST_WAIT_NS + 1;
        let mut join = join(&[allocation(1, stack_kind::COPIED)]);
        assert_eq!(next(&mut join, true, late - 1), None, "it may still come");
        assert_eq!(next(&mut join, false, late), None, "it may be in the ring");
        assert_eq!(next(&mut join, true, late), Some((1, false)));
        // It arrives too late: no record takes it. It is dropped when the limit is reached.
        join.arrive(1, Arc::new(RawStack::lost()));
        assert_eq!((next(&mut join, true, late), join.stacks_ahead()), (None, 1));
    }

    #[test]
    fn records_without_a_copied_stack_do_not_wait() {
        let mut join = join(&[allocation(1, stack_kind::FRAME_POINTERS), free(1)]);
        let never = || -> u64 { panic!("the time does not matter") };
        let first = join.next(false, never);
        assert!(matches!(first, Some((Some(Event::Allocation(record)), None)) if record.sample == 1));
        assert!(matches!(join.next(false, never), Some((Some(Event::Free(_)), None))));
        assert!(join.next(false, never).is_none());
    }

    #[test]
    fn what_is_not_understood_does_not_hold_up_the_rest() {
        let mut join = Join::default();
        join.queue.read_up_to(|| (1_000, 1));
        join.queue.push(vec![99; 64].into());
        join.queue.push(free(7).to_bytes().into());
        join.queue.has_read_up_to(1);
        assert!(matches!(join.next(true, || 0), Some((None, None))));
        assert_eq!(next(&mut join, true, 0), Some((7, false)));
    }
}
