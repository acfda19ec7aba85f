//! The queue of batches to deliver. It is bounded and in order, in memory or on disk. Dropped batches are counted.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use heapbpf_profile::units;

use super::batch::Batch;
use super::own_dir::SpoolError;
use super::spool::{NotKept, Pushed, Spool, SpoolOptions};

/// Maximum number of bytes that wait in memory.
const MOST_BYTES: usize = 64 << 20;
/// Time between two attempts to read the spool.
const READ_AGAIN_AFTER: Duration = Duration::from_secs(10);

/// Delivery counts so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Batches that the destination accepted.
    pub delivered: u64,
    /// Batches dropped for lack of space.
    pub dropped: u64,
    /// Batches that the destination rejected permanently.
    pub rejected: u64,
    /// Failed attempts that were, or will be, repeated.
    pub failures: u64,
    /// Batches waiting now.
    pub waiting: u64,
    /// Bytes waiting now.
    pub waiting_bytes: u64,
}

#[derive(Debug)]
enum Store {
    Memory { batches: VecDeque<(u64, Batch)>, bytes: usize, next: u64 },
    Disk(Spool),
}

impl Store {
    /// Adds a batch. Drops the oldest ones to make space for it, unless it is too large for the store.
    fn push(&mut self, batch: &Batch) -> Pushed {
        let (batches, bytes, next) = match self {
            Self::Memory { batches, bytes, next } => (batches, bytes, next),
            Self::Disk(spool) => return spool.push(batch),
        };
        if batch.body.len() > MOST_BYTES {
            return Pushed { dropped: 0, kept: Err(NotKept::TooLarge(batch.body.len() as u64)) };
        }
        *bytes += batch.body.len();
        batches.push_back((*next, batch.clone()));
        *next += 1;
        let mut dropped = 0;
        while *bytes > MOST_BYTES
            && let Some((_, old)) = batches.pop_front()
        {
            *bytes -= old.body.len();
            dropped += 1;
        }
        Pushed { dropped, kept: Ok(()) }
    }

    /// Removes a batch, if it is still there.
    fn remove(&mut self, number: u64) {
        match self {
            Self::Memory { batches, bytes, .. } => {
                if batches.front().is_some_and(|(first, _)| *first == number) {
                    *bytes -= batches.pop_front().map_or(0, |(_, batch)| batch.body.len());
                }
            }
            Self::Disk(spool) => {
                spool.remove(number);
            }
        }
    }

    /// Number of the oldest batch.
    fn first_number(&self) -> Option<u64> {
        match self {
            Self::Memory { batches, .. } => batches.front().map(|(number, _)| *number),
            Self::Disk(spool) => spool.first_number(),
        }
    }

    /// Number of waiting batches, and their bytes.
    fn waiting(&self) -> (u64, u64) {
        match self {
            Self::Memory { batches, bytes, .. } => (batches.len() as u64, *bytes as u64),
            Self::Disk(spool) => spool.waiting(),
        }
    }

    /// Returns the message for the first batches that are dropped.
    fn dropped_text(&self, pushed: &Pushed) -> Option<String> {
        let (most, place, remedy) = match self {
            Self::Memory { .. } => (MOST_BYTES as u64, "memory", "--spool DIR keeps more on disk"),
            Self::Disk(spool) => (spool.most_bytes, "the spool", "raise --spool-bytes"),
        };
        let most = units::bytes(most as f64);
        match pushed {
            Pushed { kept: Err(NotKept::TooLarge(size)), .. } => {
                let size = units::bytes(*size as f64);
                Some(format!("a profile of {size} was dropped: at most {most} may wait in {place}; {remedy}"))
            }
            Pushed { dropped: 0, .. } => None,
            Pushed { dropped, .. } => {
                let s = if *dropped == 1 { "" } else { "s" };
                Some(format!(
                    "{dropped} profile{s} dropped (oldest first): at most {most} may wait in {place}; {remedy}"
                ))
            }
        }
    }
}

#[derive(Debug)]
struct State {
    store: Store,
    counts: Counts,
    closed: bool,
    /// The batch that is being sent.
    sending: Option<u64>,
    /// Whether that batch was dropped while being sent. Its outcome is not known yet.
    sending_dropped: bool,
    /// Whether each message was logged: that batches were dropped to make space, and that one was too large.
    logged: (bool, bool),
    /// Whether it was logged that a batch cannot be read.
    unreadable_logged: bool,
}

/// A queue between the thread that makes profiles and the one that sends them.
#[derive(Debug)]
pub struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

impl Queue {
    fn new(store: Store) -> Self {
        let (counts, logged) = Default::default();
        let state = State {
            store,
            counts,
            closed: false,
            sending: None,
            sending_dropped: false,
            logged,
            unreadable_logged: false,
        };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// A queue in memory. Waiting batches are lost when the process ends.
    pub fn in_memory() -> Self {
        Self::new(Store::Memory { batches: VecDeque::new(), bytes: 0, next: 0 })
    }

    /// A queue on disk. It starts with the batches that an earlier run left there.
    ///
    /// # Errors
    /// The directory cannot be used.
    pub fn on_disk(options: &SpoolOptions, destination: &str) -> Result<Self, SpoolError> {
        Ok(Self::new(Store::Disk(Spool::open(options, destination)?)))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether waiting batches outlive the process.
    pub fn is_on_disk(&self) -> bool {
        matches!(self.lock().store, Store::Disk(_))
    }

    /// Adds a batch. Drops the oldest ones to make space for it. Returns a message about dropped batches, the first
    /// time and whenever a batch could not be written.
    pub fn push(&self, batch: &Batch) -> Option<String> {
        let mut state = self.lock();
        let pushed = state.store.push(batch);
        let mut dropped = pushed.dropped;
        let is_gone = |number: u64| state.store.first_number().is_none_or(|first| first > number);
        if !state.sending_dropped && state.sending.is_some_and(is_gone) {
            // It may still be delivered.
            state.sending_dropped = true;
            dropped -= 1;
        }
        state.counts.dropped += dropped + u64::from(pushed.kept.is_err());
        self.changed.notify_all();
        let logged = match &pushed.kept {
            Err(NotKept::Io(error)) => return Some(format!("a profile was not kept for delivery: {error}")),
            Err(NotKept::TooLarge(_)) => &mut state.logged.1,
            Ok(()) if pushed.dropped > 0 => &mut state.logged.0,
            Ok(()) => return None,
        };
        if std::mem::replace(logged, true) { None } else { state.store.dropped_text(&pushed) }
    }

    /// Waits for the oldest batch. `None` once the queue is closed, and empty or unreadable.
    pub fn next(&self) -> Option<(u64, Batch)> {
        let mut state = self.lock();
        loop {
            let (first, removed) = match &mut state.store {
                Store::Memory { batches, .. } => (Ok(batches.front().cloned()), 0),
                Store::Disk(spool) => spool.first(),
            };
            state.counts.dropped += removed;
            let wait = if first.is_ok() { Duration::MAX } else { READ_AGAIN_AFTER };
            let first = first.unwrap_or_else(|error| {
                if !std::mem::replace(&mut state.unreadable_logged, true) {
                    log::warn!("cannot read a profile in the spool: {error}; heapbpf keeps trying");
                }
                None
            });
            if first.is_some() || state.closed {
                state.sending = first.as_ref().map(|(number, _)| *number);
                return first;
            }
            state = self.changed.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Removes the batch with this number, because it was delivered or rejected permanently.
    pub fn done(&self, number: u64, delivered: bool) {
        let mut state = self.lock();
        state.store.remove(number);
        // If it was dropped while being sent, that did no harm: it is counted by its outcome.
        (state.sending, state.sending_dropped) = (None, false);
        *(if delivered { &mut state.counts.delivered } else { &mut state.counts.rejected }) += 1;
        self.changed.notify_all();
    }

    /// Records a failed attempt, then waits for `wait` or until the queue is closed. Returns whether it is still open.
    pub fn failed(&self, wait: Duration) -> bool {
        let mut state = self.lock();
        state.counts.failures += 1;
        state.sending = None;
        state.counts.dropped += u64::from(std::mem::take(&mut state.sending_dropped));
        let waited = self.changed.wait_timeout_while(state, wait, |state| !state.closed);
        !waited.unwrap_or_else(PoisonError::into_inner).0.closed
    }

    /// Closes the queue: no more batches will come.
    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Waits until the queue is empty or the deadline has passed. Returns whether it is empty.
    pub fn wait_until_empty(&self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.changed.wait_timeout_while(self.lock(), left, |state| state.store.waiting().0 > 0);
        waited.unwrap_or_else(PoisonError::into_inner).0.store.waiting().0 == 0
    }

    /// The counts so far.
    pub fn counts(&self) -> Counts {
        let state = self.lock();
        let (waiting, waiting_bytes) = state.store.waiting();
        Counts { waiting, waiting_bytes, ..state.counts }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(number: u8, bytes: usize) -> Batch {
        Batch { path: "/".into(), content_type: "x".into(), body: vec![number; bytes] }
    }

    #[test]
    fn batches_go_in_order_and_the_oldest_are_dropped() {
        let queue = Queue::in_memory();
        for number in 0..4 {
            queue.push(&batch(number, MOST_BYTES / 3));
        }
        assert_eq!((queue.counts().dropped, queue.counts().waiting), (1, 3));
        let (number, first) = queue.next().unwrap();
        assert_eq!(first.body[0], 1);
        queue.done(number, true);
        assert_eq!(queue.next().unwrap().1.body[0], 2);
        queue.close();
        assert!(!queue.failed(Duration::from_secs(100)), "a closed queue waits for nothing");
        for delivered in [false, true] {
            let (number, _) = queue.next().unwrap();
            queue.done(number, delivered);
        }
        assert_eq!(queue.next(), None);
        assert!(queue.wait_until_empty(Instant::now()));
        let counts = queue.counts();
        assert_eq!((counts.delivered, counts.rejected, counts.failures, counts.waiting_bytes), (2, 1, 1, 0));
    }

    /// A batch that is dropped while it is being sent is counted once, by its outcome, and no count falls.
    #[test]
    fn what_was_dropped_while_it_was_sent_counts_once() {
        for (delivered, expected) in [(Some(true), [1, 0, 0]), (Some(false), [0, 1, 0]), (None, [0, 0, 1])] {
            let queue = Queue::in_memory();
            queue.push(&batch(1, MOST_BYTES));
            let (number, _) = queue.next().unwrap();
            queue.push(&batch(2, MOST_BYTES));
            assert_eq!((queue.counts().dropped, queue.counts().waiting), (0, 1), "it may still be delivered");
            match delivered {
                Some(delivered) => queue.done(number, delivered),
                None => assert!(queue.failed(Duration::ZERO)),
            }
            let counts = queue.counts();
            assert_eq!([counts.delivered, counts.rejected, counts.dropped], expected);
            assert_eq!(queue.next().unwrap().1.body[0], 2);
        }
    }

    #[test]
    fn a_batch_that_is_too_large_costs_no_others_and_is_told_once() {
        let queue = Queue::in_memory();
        assert_eq!(queue.push(&batch(1, 10)), None);
        let message = queue.push(&batch(2, MOST_BYTES + 1)).unwrap();
        assert!(
            message.starts_with("a profile of 64.0 MiB was dropped") && message.contains("--spool DIR"),
            "{message}"
        );
        assert_eq!(queue.push(&batch(2, MOST_BYTES + 1)), None);
        let counts = queue.counts();
        assert_eq!((counts.dropped, counts.waiting, queue.next().unwrap().1.body[0]), (2, 1, 1));
        let message = queue.push(&batch(3, MOST_BYTES)).unwrap();
        assert!(message.starts_with("1 profile dropped (oldest first)"), "{message}");
        assert_eq!(queue.push(&batch(4, MOST_BYTES)), None);
    }

    #[test]
    fn what_cannot_be_read_at_the_end_waits_for_the_next_run() {
        let dir = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(&SpoolOptions { dir: dir.path().into(), most_bytes: 2048 }, "x").unwrap();
        spool.push(&batch(1, 10)).kept.unwrap();
        spool.dir.path = "/dev/null".into();
        let queue = Queue::new(Store::Disk(spool));
        queue.close();
        assert_eq!((queue.next(), queue.counts().dropped, queue.counts().waiting), (None, 0, 1));
    }

    /// What is sent is not the oldest then.
    #[test]
    fn what_was_dropped_together_with_an_unreadable_one_counts_once() {
        let dir = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(&SpoolOptions { dir: dir.path().into(), most_bytes: 2100 }, "x").unwrap();
        (1..=2).for_each(|number| spool.push(&batch(number, 1000)).kept.unwrap());
        spool.make_unreadable(0);
        let queue = Queue::new(Store::Disk(spool));
        let (number, first) = queue.next().unwrap();
        assert_eq!((number, first.body[0]), (1, 2));
        queue.push(&batch(3, 2000));
        assert_eq!((queue.counts().dropped, queue.counts().waiting), (1, 1), "the other may still be delivered");
        queue.done(number, true);
        assert_eq!((queue.counts().dropped, queue.counts().delivered), (1, 1));
        assert_eq!(queue.next().unwrap().1.body[0], 3);
    }

    #[test]
    fn of_a_spool_that_is_too_small_its_size_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let queue = Queue::on_disk(&SpoolOptions { dir: dir.path().into(), most_bytes: 2048 }, "x").unwrap();
        let message = queue.push(&batch(1, 1 << 20)).unwrap();
        assert!(
            message.contains("1.00 MiB") && message.contains("2.00 KiB") && message.contains("--spool-bytes"),
            "{message}"
        );
        assert_eq!((queue.counts().dropped, queue.counts().waiting), (1, 0));
    }
}
