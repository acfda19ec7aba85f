//! Shares profiles between clients: one snapshot answers every client that asked before it was taken.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{Mutex as AsyncMutex, OnceCell};

use super::filter::Filter;
use crate::record::requests::{Detail, Ended, Made, RecordingHandle};

/// The pause after a snapshot is this many times what the snapshot cost, so that snapshots hold up the event path
/// only for a small share of the time.
const STANDSTILL: u32 = 10;
/// Upper limit of that pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Maximum number of profiles with stacks held in memory for answers and differences in progress.
const MOST_HELD: usize = 16;

/// Identifies an encoding of a profile.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// What the client may see.
    pub scope: Filter,
    /// What the client asked for.
    pub filter: Filter,
    /// Value that viewers show first.
    pub first: &'static str,
}

type Encodings = Vec<(Wanted, Arc<OnceCell<Bytes>>)>;

/// A shared profile, with the encodings made so far.
pub struct Shared {
    /// The profile.
    pub made: Made,
    encodings: Mutex<Encodings>,
}

impl Shared {
    /// The cell for an encoding. The first client fills it, the others wait for it.
    pub fn encoding(&self, wanted: &Wanted) -> Arc<OnceCell<Bytes>> {
        let mut encodings = self.encodings.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, cell)) = encodings.iter().find(|(known, _)| known == wanted) {
            return Arc::clone(cell);
        }
        let cell = Arc::default();
        encodings.push((wanted.clone(), Arc::clone(&cell)));
        cell
    }
}

/// Why there is no profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// The recording is over.
    #[error(transparent)]
    Ended(#[from] Ended),
    /// Too many different profiles are in use.
    #[error("too many profiles are being compared and sent at this moment; try again later")]
    Busy,
}

#[derive(Default)]
struct Last {
    shared: Option<Arc<Shared>>,
    /// Earliest time of the next snapshot.
    not_before: Option<Instant>,
}

/// The source of profiles for answers.
pub struct Source {
    recording: RecordingHandle,
    totals: AsyncMutex<Last>,
    stacks: AsyncMutex<Last>,
    held: Mutex<Vec<Weak<Shared>>>,
}

impl Source {
    /// A source that has taken no profile yet.
    pub fn new(recording: RecordingHandle) -> Self {
        Self { recording, totals: AsyncMutex::default(), stacks: AsyncMutex::default(), held: Mutex::default() }
    }

    /// A profile of some moment between the call and its return.
    ///
    /// # Errors
    /// See [`SourceError`].
    pub async fn profile(&self, detail: Detail) -> Result<Arc<Shared>, SourceError> {
        let asked = Instant::now();
        let last = if detail == Detail::Totals { &self.totals } else { &self.stacks };
        let mut last = last.lock().await;
        if let Some(shared) = last.shared.as_ref().filter(|shared| shared.made.begun >= asked) {
            return Ok(Arc::clone(shared));
        }
        // Drop the old profile first. Clients that still need it hold a reference.
        last.shared = None;
        if let Some(at) = last.not_before {
            tokio::time::sleep_until(at.into()).await;
        }
        if detail != Detail::Totals {
            let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
            held.retain(|shared| shared.strong_count() > 0);
            if held.len() >= MOST_HELD {
                return Err(SourceError::Busy);
            }
        }
        let made = self.recording.profile(detail).await?;
        let pause = (made.cost * STANDSTILL).min(LONGEST_PAUSE);
        last.not_before = Some(made.begun + made.cost + pause);
        let shared = Arc::new(Shared { made, encodings: Mutex::default() });
        if detail != Detail::Totals {
            self.held.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&shared));
        }
        last.shared = Some(Arc::clone(&shared));
        Ok(shared)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Stats;
    use heapbpf_profile::testing;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A recording that answers after a delay and counts the requests.
    fn recording(delay: Duration) -> (RecordingHandle, Arc<AtomicUsize>) {
        let (recording, mut queue) = RecordingHandle::new();
        let count = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&count);
        tokio::spawn(async move {
            while let Some(request) = queue.recv().await {
                counted.fetch_add(1, Ordering::Relaxed);
                let begun = Instant::now();
                tokio::time::sleep(delay).await;
                let profile = testing::small();
                let (stats, keys, cost) = (Stats::default(), Vec::new(), Duration::ZERO);
                let _ = request.reply.send(Made { profile, stats, keys, begun, cost });
            }
        });
        (recording, count)
    }

    #[tokio::test(flavor = "current_thread")]
    async fn who_asks_while_one_is_made_shares_the_next() {
        let (recording, count) = recording(Duration::from_millis(50));
        let source = Arc::new(Source::new(recording));
        let clients: Vec<_> = (0..100)
            .map(|_| {
                let source = Arc::clone(&source);
                tokio::spawn(async move {
                    let asked = Instant::now();
                    let shared = source.profile(Detail::Stacks).await.unwrap();
                    assert!(shared.made.begun >= asked, "an answer is never older than its question");
                })
            })
            .collect();
        for client in clients {
            client.await.unwrap();
        }
        assert!(count.load(Ordering::Relaxed) <= 2, "{count:?}");
        source.profile(Detail::Stacks).await.unwrap();
        assert!(count.load(Ordering::Relaxed) >= 2, "a later question gets a later answer");
    }

    #[tokio::test(flavor = "current_thread")]
    async fn profiles_in_memory_are_bounded_and_the_end_is_said() {
        let (recording, _) = recording(Duration::ZERO);
        let source = Source::new(recording);
        let mut held = Vec::new();
        for _ in 0..MOST_HELD {
            held.push(source.profile(Detail::Stacks).await.unwrap());
        }
        assert_eq!(source.profile(Detail::Stacks).await.err(), Some(SourceError::Busy));
        assert!(source.profile(Detail::Totals).await.is_ok(), "totals are small");
        held.pop();
        assert!(source.profile(Detail::Stacks).await.is_ok());
        let (recording, queue) = RecordingHandle::new();
        drop(queue);
        assert_eq!(Source::new(recording).profile(Detail::Totals).await.err(), Some(SourceError::Ended(Ended)));
    }
}
