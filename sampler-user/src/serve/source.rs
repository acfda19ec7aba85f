//! Profiles for many askers at the price of one: a snapshot answers everyone who came before it was taken.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{Mutex as AsyncMutex, OnceCell};

use super::filter::Filter;
use crate::record::maker::Made;
use crate::record::requests::{Ended, Recording};
use crate::record::snapshot::Detail;

/// The event path stands still for at most this share of the time because of snapshots.
const STANDSTILL: u32 = 10;
/// … and waits for no snapshot longer than this.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Profiles with stacks held in memory for answers and differences under way.
const MOST_HELD: usize = 16;

/// Which encoding of a profile.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// What the asker may see.
    pub scope: Filter,
    /// What of it was asked for.
    pub filter: Filter,
    /// Value that viewers show first.
    pub first: &'static str,
}

type Encodings = Vec<(Wanted, Arc<OnceCell<Bytes>>)>;

/// A profile, shared, with its encodings so far.
pub struct Shared {
    /// The profile.
    pub made: Made,
    encodings: Mutex<Encodings>,
}

impl Shared {
    /// The place of an encoding: filled by the first who asks, waited for by the others.
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
    /// Too many different ones are in use.
    #[error("too many profiles are being compared and sent at this moment; try again later")]
    Busy,
}

#[derive(Default)]
struct Last {
    shared: Option<Arc<Shared>>,
    /// No snapshot before this.
    not_before: Option<Instant>,
}

/// Where answers take their profiles from.
pub struct Source {
    recording: Recording,
    totals: AsyncMutex<Last>,
    stacks: AsyncMutex<Last>,
    held: Mutex<Vec<Weak<Shared>>>,
}

impl Source {
    /// Nothing has been asked for yet.
    pub fn new(recording: Recording) -> Self {
        Self { recording, totals: AsyncMutex::default(), stacks: AsyncMutex::default(), held: Mutex::default() }
    }

    /// A profile of a moment between the call and its return.
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
        // The old one goes first: whoever still needs it holds it.
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
    use crate::profile::stats::Stats;
    use crate::profile::testing;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A recording that answers after a while, and counts.
    fn recording(delay: Duration) -> (Recording, Arc<AtomicUsize>) {
        let (recording, mut queue) = Recording::new();
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
        let askers: Vec<_> = (0..100)
            .map(|_| {
                let source = Arc::clone(&source);
                tokio::spawn(async move {
                    let asked = Instant::now();
                    let shared = source.profile(Detail::Stacks).await.unwrap();
                    assert!(shared.made.begun >= asked, "an answer is never older than its question");
                })
            })
            .collect();
        for asker in askers {
            asker.await.unwrap();
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
        let (recording, queue) = Recording::new();
        drop(queue);
        assert_eq!(Source::new(recording).profile(Detail::Totals).await.err(), Some(SourceError::Ended(Ended)));
    }
}
