//! Shares profiles between clients: one snapshot answers every client that asked before it was taken.

use std::collections::HashSet;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use heapbpf_access::filter::Filter;
use heapbpf_access::parameters::ProfileFormat;
use heapbpf_record::requests::{Detail, Made, RecordingHandle, Unanswered};
use tokio::sync::{Mutex as AsyncMutex, OnceCell};

use super::places::places_of_each;

/// The pause after a snapshot is this many times the snapshot's cost, so that snapshots delay the event path for only a
/// small share of the time.
const STANDSTILL: u32 = 10;
/// Upper limit of that pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// The pause after a snapshot whose client left before the answer, so that its cost is not known.
const PAUSE_AFTER_ABANDONED: Duration = Duration::from_millis(500);
/// Maximum number of profiles with stacks held in memory for answers and differences in progress, over all tokens.
const MOST_HELD: usize = 16;
/// Minimum number of these for each token, however many tokens there are: two differences and an answer.
const LEAST_HELD: usize = 4;

/// Identifies an encoding of a profile.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// What the client may see.
    pub scope: Filter,
    /// What the client asked for.
    pub filter: Filter,
    /// Value that viewers show first.
    pub first: &'static str,
    /// How it is encoded.
    pub format: ProfileFormat,
}

type Encodings = Vec<(Wanted, Arc<OnceCell<Bytes>>)>;

/// A shared profile, with the encodings made so far.
pub struct Shared {
    /// The profile.
    pub made: Made,
    encodings: Mutex<Encodings>,
}

impl Shared {
    /// Returns the cell for an encoding. The first client fills it, the others wait for it.
    pub fn encoding(&self, wanted: &Wanted) -> Arc<OnceCell<Bytes>> {
        let mut encodings = self.encodings.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, cell)) = encodings.iter().find(|(known, _)| known == wanted) {
            return Arc::clone(cell);
        }
        let cell = Arc::default();
        encodings.push((wanted.clone(), Arc::clone(&cell)));
        cell
    }

    /// Drops the encodings made so far.
    pub fn forget_encodings(&self) {
        self.encodings.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    #[cfg(test)]
    pub fn new(made: Made) -> Self {
        Self { made, encodings: Mutex::default() }
    }
}

/// A profile used by a request. It counts against the request's token until it is dropped.
#[derive(Clone)]
pub struct Held {
    shared: Arc<Shared>,
    _charge: Arc<()>,
}

impl Held {
    /// The profile, to keep beyond the request.
    pub fn kept(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }
}

impl Deref for Held {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.shared
    }
}

/// A request's use of a profile. The request may still be in progress.
struct Charge {
    token: usize,
    profile: Weak<Shared>,
    in_use: Weak<()>,
}

/// Why there is no profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// The recording makes no profile.
    #[error(transparent)]
    Unanswered(#[from] Unanswered),
    /// Too many different profiles are in use.
    #[error("too many profiles are being compared and sent right now; try again later")]
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
    lifetimes: AsyncMutex<Last>,
    charges: Mutex<Vec<Charge>>,
    /// Moments that divide what is in use by allocation time, in profiles with stacks.
    marks: Mutex<Vec<Duration>>,
    /// Maximum number of different profiles with stacks that requests with one token may hold.
    most_held: usize,
}

impl Source {
    /// Creates a source that has taken no profile yet, for this many tokens.
    pub fn new(recording: RecordingHandle, tokens: usize) -> Self {
        Self {
            recording,
            totals: AsyncMutex::default(),
            stacks: AsyncMutex::default(),
            lifetimes: AsyncMutex::default(),
            charges: Mutex::default(),
            marks: Mutex::default(),
            most_held: places_of_each(MOST_HELD, tokens).max(LEAST_HELD),
        }
    }

    /// From now on, profiles with stacks divide what is in use by these moments: times since the start of the
    /// recording, ascending.
    pub fn set_marks(&self, marks: Vec<Duration>) {
        *self.marks.lock().unwrap_or_else(PoisonError::into_inner) = marks;
    }

    /// Returns totals for the history. Memory is not measured for them.
    ///
    /// # Errors
    /// See [`Unanswered`].
    pub async fn totals_unmeasured(&self) -> Result<Made, Unanswered> {
        self.recording.totals_unmeasured().await
    }

    /// Returns a profile of some moment between the call and its return, for the bearer of a token.
    ///
    /// # Errors
    /// See [`SourceError`].
    pub async fn profile(&self, token: usize, detail: Detail) -> Result<Held, SourceError> {
        self.profile_if(detail, token, |held| held < self.most_held).await
    }

    /// Does the same for a request that has waited for this profile. It is never refused.
    ///
    /// # Errors
    /// See [`SourceError`].
    pub async fn second_profile(&self, token: usize, detail: Detail) -> Result<Held, SourceError> {
        self.profile_if(detail, token, |_| true).await
    }

    /// `may_hold`: whether a token that holds this many other profiles with stacks may hold one more.
    async fn profile_if(
        &self,
        detail: Detail,
        token: usize,
        may_hold: impl Fn(usize) -> bool,
    ) -> Result<Held, SourceError> {
        let asked = Instant::now();
        let last = match detail {
            Detail::Totals => &self.totals,
            Detail::Stacks => &self.stacks,
            Detail::Lifetimes => &self.lifetimes,
        };
        // Totals are small, so they are not limited.
        let may_hold = |held: usize| detail == Detail::Totals || may_hold(held);
        let mut last = last.lock().await;
        if let Some(shared) = last.shared.as_ref().filter(|shared| shared.made.begun >= asked) {
            return if may_hold(self.held_by(token, Some(shared))) {
                Ok(self.charged(token, detail, shared))
            } else {
                Err(SourceError::Busy)
            };
        }
        if !may_hold(self.held_by(token, None)) {
            return Err(SourceError::Busy);
        }
        // Drop the old profile first. Clients that still need it hold a reference.
        last.shared = None;
        if let Some(at) = last.not_before {
            tokio::time::sleep_until(at.into()).await;
        }
        // If the client leaves before the answer, the snapshot is taken all the same.
        last.not_before = Some(Instant::now() + PAUSE_AFTER_ABANDONED);
        let made = match detail {
            Detail::Stacks => {
                let marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner).clone();
                self.recording.profile_by_marks(detail, marks).await
            }
            Detail::Totals | Detail::Lifetimes => self.recording.profile(detail).await,
        };
        last.not_before = None;
        let made = made?;
        let pause = (made.cost * STANDSTILL).min(LONGEST_PAUSE);
        last.not_before = Some(made.begun + made.cost + pause);
        let shared = Arc::new(Shared { made, encodings: Mutex::default() });
        last.shared = Some(Arc::clone(&shared));
        Ok(self.charged(token, detail, &shared))
    }

    /// Returns how many different profiles with stacks are held by requests with a token, not counting `but`.
    fn held_by(&self, token: usize, but: Option<&Arc<Shared>>) -> usize {
        let mut charges = self.charges.lock().unwrap_or_else(PoisonError::into_inner);
        charges.retain(|charge| charge.in_use.strong_count() > 0);
        let of_token = charges.iter().filter(|charge| charge.token == token).map(|charge| charge.profile.as_ptr());
        let others = of_token.filter(|profile| but.is_none_or(|but| *profile != Arc::as_ptr(but)));
        others.collect::<HashSet<_>>().len()
    }

    fn charged(&self, token: usize, detail: Detail, shared: &Arc<Shared>) -> Held {
        let in_use = Arc::new(());
        if detail != Detail::Totals {
            let charge = Charge { token, profile: Arc::downgrade(shared), in_use: Arc::downgrade(&in_use) };
            self.charges.lock().unwrap_or_else(PoisonError::into_inner).push(charge);
        }
        Held { shared: Arc::clone(shared), _charge: in_use }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use heapbpf_profile::testing;
    use heapbpf_record::recent::Recent;
    use heapbpf_record::stats::Stats;

    use super::*;

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
                let recent = Recent::default();
                let _ = request.reply.send(Ok(Made { profile, stats, keys, recent, begun, cost, cpu: cost }));
            }
        });
        (recording, count)
    }

    #[tokio::test(flavor = "current_thread")]
    async fn who_asks_while_one_is_made_shares_the_next() {
        let (recording, count) = recording(Duration::from_millis(50));
        let source = Arc::new(Source::new(recording, 1));
        let clients: Vec<_> = (0..100)
            .map(|_| {
                let source = Arc::clone(&source);
                tokio::spawn(async move {
                    let asked = Instant::now();
                    let shared = source.profile(0, Detail::Stacks).await.unwrap();
                    assert!(shared.made.begun >= asked, "an answer is never older than its question");
                })
            })
            .collect();
        for client in clients {
            client.await.unwrap();
        }
        assert!(count.load(Ordering::Relaxed) <= 2, "{count:?}");
        source.profile(0, Detail::Stacks).await.unwrap();
        assert!(count.load(Ordering::Relaxed) >= 2, "a later question gets a later answer");
    }

    #[tokio::test(flavor = "current_thread")]
    async fn profiles_in_memory_are_bounded_and_the_end_is_said() {
        let (recording, _) = recording(Duration::ZERO);
        let source = Source::new(recording, 1);
        let mut held = Vec::new();
        for _ in 0..MOST_HELD {
            held.push(source.profile(0, Detail::Stacks).await.unwrap());
        }
        assert_eq!(source.profile(0, Detail::Stacks).await.err(), Some(SourceError::Busy));
        assert!(source.profile(0, Detail::Totals).await.is_ok(), "totals are small");
        assert!(source.second_profile(0, Detail::Stacks).await.is_ok(), "who has waited is not turned away");
        held.pop();
        assert!(source.profile(0, Detail::Stacks).await.is_ok());
        let (recording, queue) = RecordingHandle::new();
        drop(queue);
        assert_eq!(
            Source::new(recording, 1).profile(0, Detail::Totals).await.err(),
            Some(SourceError::Unanswered(Unanswered::Ended))
        );
    }

    /// A token that holds its maximum does not keep others from a profile, not even if it holds profiles that others
    /// asked for.
    #[tokio::test(flavor = "current_thread")]
    async fn each_token_has_its_own_capacity_for_profiles() {
        let (recording, _) = recording(Duration::ZERO);
        let source = Source::new(recording, 2);
        let of_each = MOST_HELD / 2;
        let mut held = Vec::new();
        for _ in 0..of_each {
            let (first, both) = tokio::join!(source.profile(1, Detail::Stacks), source.profile(0, Detail::Stacks));
            drop(first.unwrap());
            held.push(both.unwrap());
        }
        assert_eq!(source.profile(0, Detail::Stacks).await.err(), Some(SourceError::Busy));
        for _ in 0..of_each {
            held.push(source.profile(1, Detail::Stacks).await.unwrap());
        }
        assert_eq!(source.profile(1, Detail::Stacks).await.err(), Some(SourceError::Busy));
    }
}
