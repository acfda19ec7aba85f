//! The queue of batches to deliver: bounded, in order, in memory or on disk. Dropped batches are counted.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::batch::Batch;
use super::spool::{Spool, SpoolError, SpoolOptions};

/// Maximum number of bytes that wait in memory.
const MOST_BYTES: usize = 64 << 20;

/// Delivery counts so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Batches that the destination accepted.
    pub delivered: u64,
    /// Batches dropped for lack of room.
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

#[derive(Debug)]
struct State {
    store: Store,
    counts: Counts,
    closed: bool,
}

/// A queue between the thread that makes profiles and the one that sends them.
#[derive(Debug)]
pub struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

impl Queue {
    fn new(store: Store) -> Self {
        Self { state: Mutex::new(State { store, counts: Counts::default(), closed: false }), changed: Condvar::new() }
    }

    /// A queue in memory. Waiting batches are lost when the process ends.
    pub fn in_memory() -> Self {
        Self::new(Store::Memory { batches: VecDeque::new(), bytes: 0, next: 0 })
    }

    /// A queue on disk. It starts with the batches that an earlier run left there.
    ///
    /// # Errors
    /// The folder cannot be used.
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

    /// Adds a batch. The oldest ones are dropped to make room.
    pub fn push(&self, batch: &Batch) {
        let mut state = self.lock();
        let dropped = match &mut state.store {
            Store::Memory { batches, bytes, next } => {
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
                dropped
            }
            Store::Disk(spool) => spool.push(batch).unwrap_or_else(|error| {
                log::warn!("a profile was not kept for delivery: {error}");
                1
            }),
        };
        state.counts.dropped += dropped;
        self.changed.notify_all();
    }

    /// Waits for the oldest batch. `None` once the queue is closed and empty.
    pub fn next(&self) -> Option<(u64, Batch)> {
        let mut state = self.lock();
        loop {
            let first = match &mut state.store {
                Store::Memory { batches, .. } => batches.front().cloned(),
                Store::Disk(spool) => {
                    let (first, unreadable) = spool.first();
                    state.counts.dropped += unreadable;
                    first
                }
            };
            if first.is_some() || state.closed {
                return first;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Removes the batch with this number: it was delivered, or rejected permanently.
    pub fn done(&self, number: u64, delivered: bool) {
        let mut state = self.lock();
        match &mut state.store {
            Store::Memory { batches, bytes, .. } => {
                // The batch may have been dropped meanwhile to make room.
                if batches.front().is_some_and(|(first, _)| *first == number) {
                    *bytes -= batches.pop_front().map_or(0, |(_, batch)| batch.body.len());
                } else if delivered {
                    state.counts.dropped = state.counts.dropped.saturating_sub(1);
                }
            }
            Store::Disk(spool) => {
                if !spool.remove(number) && delivered {
                    state.counts.dropped = state.counts.dropped.saturating_sub(1);
                }
            }
        }
        *(if delivered { &mut state.counts.delivered } else { &mut state.counts.rejected }) += 1;
        self.changed.notify_all();
    }

    /// Records a failed attempt, then waits for `wait` or until the queue is closed. Returns whether it is still
    /// open.
    pub fn failed(&self, wait: Duration) -> bool {
        let deadline = Instant::now() + wait;
        let mut state = self.lock();
        state.counts.failures += 1;
        while !state.closed {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        false
    }

    /// Closes the queue: no more batches will come.
    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Waits until everything is delivered. Returns whether it is.
    pub fn wait_until_empty(&self, deadline: Instant) -> bool {
        let mut state = self.lock();
        loop {
            if waiting(&state.store).0 == 0 {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The counts so far.
    pub fn counts(&self) -> Counts {
        let state = self.lock();
        let (waiting, waiting_bytes) = waiting(&state.store);
        Counts { waiting, waiting_bytes, ..state.counts }
    }
}

fn waiting(store: &Store) -> (u64, u64) {
    match store {
        Store::Memory { batches, bytes, .. } => (batches.len() as u64, *bytes as u64),
        Store::Disk(spool) => spool.waiting(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(number: u8, bytes: usize) -> Batch {
        Batch { path: "/".into(), content_type: "x".into(), body: vec![number; bytes] }
    }

    #[test]
    fn batches_go_in_order_and_the_oldest_make_room() {
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

    #[test]
    fn what_was_delivered_while_it_made_room_was_not_lost() {
        let queue = Queue::in_memory();
        queue.push(&batch(1, MOST_BYTES));
        let (number, _) = queue.next().unwrap();
        queue.push(&batch(2, MOST_BYTES));
        assert_eq!(queue.counts().dropped, 1);
        queue.done(number, true);
        let counts = queue.counts();
        assert_eq!((counts.delivered, counts.dropped, counts.waiting), (1, 0, 1));
    }
}
