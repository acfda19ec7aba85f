//! Records of the events ring, in order of time up to a watermark.
//!
//! The ring hands out records in the order in which their places were reserved, which is not exactly their order of
//! time. But a record's time is read after its place is reserved. So once everything reserved by a moment W has been
//! read, no record with a time up to W is missing. W is then the watermark, and the records up to it can be sorted. A
//! cut is a limit on the watermark: everything up to it is taken in, and nothing after it.

use std::collections::VecDeque;

use bytes::Bytes;
use heapbpf_heap::event::time_ns_of;

/// A moment, and a position in the ring: all records with a time up to that moment lie before the position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    time_ns: u64,
    position: u64,
}

/// Records on their way from the ring to the heap. Times are CLOCK_MONOTONIC.
#[derive(Debug)]
pub struct RecordQueue {
    /// Records that are not sorted yet, in the ring's order.
    incoming: Vec<(u64, Bytes)>,
    /// Records up to the watermark, in order of time.
    ordered: VecDeque<(u64, Bytes)>,
    mark: Option<Mark>,
    watermark_ns: u64,
    /// Upper limit of the watermark.
    cut_ns: u64,
}

impl Default for RecordQueue {
    fn default() -> Self {
        Self { incoming: Vec::new(), ordered: VecDeque::new(), mark: None, watermark_ns: 0, cut_ns: u64::MAX }
    }
}

impl RecordQueue {
    /// Appends the next record of the ring.
    pub fn push(&mut self, record: Bytes) {
        self.incoming.push((time_ns_of(&record), record));
    }

    /// The position up to which to read the ring. If the last mark was reached, `now` gives a new one: first the time,
    /// then the position that is reserved next.
    pub fn read_up_to(&mut self, now: impl FnOnce() -> (u64, u64)) -> u64 {
        let mark = self.mark.get_or_insert_with(|| {
            let (time_ns, position) = now();
            Mark { time_ns, position }
        });
        mark.position
    }

    /// Notes that the ring has been read up to a position. If that reaches the mark, the watermark advances to the
    /// mark's time.
    pub fn has_read_up_to(&mut self, position: u64) {
        let Some(mark) = self.mark.take_if(|mark| mark.position <= position) else { return };
        self.watermark_ns = self.watermark_ns.max(mark.time_ns.min(self.cut_ns));
        self.order();
    }

    /// Sorts the incoming records up to the watermark.
    fn order(&mut self) {
        let watermark_ns = self.watermark_ns;
        let is_due = |(time_ns, _): &(u64, Bytes)| *time_ns <= watermark_ns;
        let mut due = if self.incoming.iter().all(is_due) {
            std::mem::take(&mut self.incoming)
        } else {
            let (due, later) = std::mem::take(&mut self.incoming).into_iter().partition(is_due);
            self.incoming = later;
            due
        };
        // The sort is stable: records of equal time keep the ring's order.
        if !due.is_sorted_by_key(|(time_ns, _)| *time_ns) {
            due.sort_by_key(|(time_ns, _)| *time_ns);
        }
        self.ordered.extend(due);
    }

    /// Sets a cut: from here on, no record later than this time is handed out. The time must not be before the current
    /// watermark; the present time never is.
    pub fn cut_at(&mut self, time_ns: u64) {
        self.cut_ns = time_ns;
    }

    /// Ends the cut: records after it are handed out again.
    pub fn end_cut(&mut self) {
        self.cut_ns = u64::MAX;
    }

    /// Whether all records up to the cut, and none after it, have been handed out.
    pub fn is_at_cut(&self) -> bool {
        self.watermark_ns == self.cut_ns && self.ordered.is_empty()
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

#[cfg(test)]
mod tests {
    use sampler_ebpf::abi::kind;

    use super::*;

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
