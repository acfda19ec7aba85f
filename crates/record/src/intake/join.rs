//! Records of the events ring, in order of time up to a watermark. They are joined with their stack copies, which
//! arrive through a separate ring.
//!
//! The ring hands out records in the order in which their places were reserved, which is not exactly their order of
//! time. But a record's time is read after its place is reserved. So once everything reserved by a moment W has been
//! read, no record with a time up to W is missing. W is then the watermark, and the records up to it can be sorted. A
//! cut is a limit on the watermark: everything up to it is taken in, and nothing after it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use heapbpf_heap::event::{Event, decode, time_ns_of};
use heapbpf_unwind::raw::RawStack;
use sampler_ebpf::abi::stack_kind;

/// Records on their way from the ring to the heap. Times are CLOCK_MONOTONIC.
#[derive(Debug, Default)]
pub struct RecordQueue {
    /// Records that are not due yet. Those of equal time are in the ring's order.
    incoming: Vec<(u64, Bytes)>,
    /// Records up to the watermark, in order of time.
    ordered: VecDeque<(u64, Bytes)>,
    /// A moment, and a position in the ring: all records with a time up to that moment lie before the position.
    mark: Option<(u64, u64)>,
    watermark_ns: u64,
    /// Upper limit of the watermark.
    cut_ns: Option<u64>,
}

impl RecordQueue {
    /// Appends the next record of the ring.
    pub fn push(&mut self, record: Bytes) {
        self.incoming.push((time_ns_of(&record), record));
    }

    /// The position up to which to read the ring. If the last mark was reached, `now` gives a new one: first the time,
    /// then the position that is reserved next.
    pub fn read_up_to(&mut self, now: impl FnOnce() -> (u64, u64)) -> u64 {
        self.mark.get_or_insert_with(now).1
    }

    /// Notes that the ring has been read up to a position. If that reaches the mark, the watermark advances to the
    /// mark's time.
    pub fn has_read_up_to(&mut self, position: u64) {
        let Some((time_ns, _)) = self.mark.take_if(|(_, marked)| *marked <= position) else { return };
        self.watermark_ns = self.watermark_ns.max(time_ns.min(self.cut_ns.unwrap_or(u64::MAX)));
        // The sort is stable: records of equal time keep the ring's order.
        self.incoming.sort_by_key(|(time_ns, _)| *time_ns);
        let due = self.incoming.partition_point(|(time_ns, _)| *time_ns <= self.watermark_ns);
        self.ordered.extend(self.incoming.drain(..due));
    }

    /// Sets a cut: from here on, no record later than this time is handed out. The time must not be before the current
    /// watermark; the present time never is.
    pub fn cut_at(&mut self, time_ns: u64) {
        self.cut_ns = Some(time_ns);
    }

    /// Ends the cut: records after it are handed out again.
    pub fn end_cut(&mut self) {
        self.cut_ns = None;
    }

    /// Whether all records up to the cut, and none after it, have been handed out.
    pub fn is_at_cut(&self) -> bool {
        self.cut_ns == Some(self.watermark_ns) && self.ordered.is_empty()
    }

    /// Time up to which all records have been handed out.
    pub fn handed_out_up_to_ns(&self) -> u64 {
        self.ordered.front().map_or(self.watermark_ns, |(time_ns, _)| time_ns.saturating_sub(1))
    }

    /// The next record, with its time.
    pub fn front(&self) -> Option<&(u64, Bytes)> {
        self.ordered.front()
    }

    /// Removes the next record, once it has been taken in.
    pub fn pop_front(&mut self) {
        self.ordered.pop_front();
    }

    /// Records after the watermark, which are not handed out yet.
    pub fn beyond(&self) -> impl Iterator<Item = &(u64, Bytes)> {
        self.incoming.iter()
    }

    /// Number of records in the queue.
    pub fn len(&self) -> usize {
        self.incoming.len() + self.ordered.len()
    }

    /// Shrinks the queue's memory to a capacity of this many records.
    pub fn shrink_to(&mut self, records: usize) {
        self.incoming.shrink_to(records);
        self.ordered.shrink_to(records);
    }
}

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

    /// An exit record with this time.
    fn record(time_ns: u64) -> Bytes {
        let mut bytes = vec![0; size_of::<sampler_ebpf::abi::ProcessRecord>()];
        bytes[..4].copy_from_slice(&kind::EXIT.to_ne_bytes());
        bytes[8..16].copy_from_slice(&time_ns.to_ne_bytes());
        bytes.into()
    }

    fn taken(queue: &mut RecordQueue) -> Vec<u64> {
        std::iter::from_fn(|| {
            let time_ns = queue.front()?.0;
            queue.pop_front();
            Some(time_ns)
        })
        .collect()
    }

    #[test]
    fn records_come_out_in_order_of_time_up_to_the_watermark() {
        let mut queue = RecordQueue::default();
        assert_eq!(queue.read_up_to(|| (100, 5)), 5);
        for time_ns in [30, 10, 120, 20] {
            queue.push(record(time_ns));
        }
        queue.has_read_up_to(4);
        assert!(queue.front().is_none(), "the mark was not reached: earlier ones may come");
        queue.push(record(5));
        queue.has_read_up_to(6);
        assert_eq!(taken(&mut queue), [5, 10, 20, 30]);
        assert_eq!((queue.len(), queue.handed_out_up_to_ns()), (1, 100));
        // The next mark.
        assert_eq!(queue.read_up_to(|| (200, 9)), 9);
        assert_eq!(queue.read_up_to(|| (300, 99)), 9, "not reached");
        queue.push(record(110));
        queue.has_read_up_to(9);
        assert_eq!(taken(&mut queue), [110, 120]);
    }

    #[test]
    fn nothing_after_a_cut_comes_out_until_it_has_been_made() {
        let mut queue = RecordQueue::default();
        queue.read_up_to(|| (50, 1));
        queue.cut_at(100);
        queue.push(record(40));
        queue.push(record(101));
        queue.has_read_up_to(1);
        assert!(!queue.is_at_cut() && queue.handed_out_up_to_ns() == 39);
        assert_eq!(taken(&mut queue), [40]);
        assert!(!queue.is_at_cut(), "records up to 100 may still come");
        queue.read_up_to(|| (150, 3));
        queue.push(record(102));
        queue.push(record(100));
        queue.has_read_up_to(3);
        assert!(!queue.is_at_cut());
        assert_eq!(taken(&mut queue), [100]);
        assert!(queue.is_at_cut());
        assert_eq!(queue.beyond().map(|(time_ns, _)| *time_ns).collect::<Vec<_>>(), [101, 102]);
        queue.end_cut();
        queue.read_up_to(|| (160, 3));
        queue.has_read_up_to(3);
        assert_eq!(taken(&mut queue), [101, 102]);
    }

    #[test]
    fn of_equal_times_the_ring_decides_and_late_ones_come_at_once() {
        let mut queue = RecordQueue::default();
        queue.read_up_to(|| (10, 0));
        let (first, second) = (record(7), record(7));
        queue.push(first.clone());
        queue.push(second);
        queue.push(record(3));
        queue.has_read_up_to(0);
        queue.pop_front();
        assert_eq!(queue.front().map(|(_, bytes)| bytes.as_ptr()), Some(first.as_ptr()));
        taken(&mut queue);
        // A late record is possible: an unmap carries the time at which its call was entered.
        queue.read_up_to(|| (20, 0));
        queue.push(record(2));
        queue.has_read_up_to(0);
        assert_eq!(taken(&mut queue), [2]);
    }
}
