//! Shares profiles between clients: one snapshot answers every client that asked before it was taken.

use std::collections::HashSet;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use heapbpf_access::parameters::ProfileFormat;
use heapbpf_record::requests::{Detail, FinishedProfile, Often, RecordingHandle, Unanswered};
use tokio::sync::{Mutex as AsyncMutex, OnceCell};

use super::page::ClientView;
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
pub struct EncodingKey {
    /// What the client sees.
    pub seen: ClientView,
    /// Value that viewers show first.
    pub first: &'static str,
    /// How it is encoded.
    pub format: ProfileFormat,
}

type Encodings = Vec<(EncodingKey, Arc<OnceCell<Bytes>>)>;

/// A shared profile, with the encodings made so far.
pub struct Shared {
    /// The profile.
    pub made: FinishedProfile,
    encodings: Mutex<Encodings>,
}

impl Shared {
    /// Returns the cell for an encoding. The first client fills it, the others wait for it.
    pub fn encoding(&self, wanted: &EncodingKey) -> Arc<OnceCell<Bytes>> {
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
    pub fn new(made: FinishedProfile) -> Self {
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
    /// The last profile of each detail.
    last: [AsyncMutex<Last>; 3],
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
            last: Default::default(),
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
    pub async fn totals_unmeasured(&self) -> Result<FinishedProfile, Unanswered> {
        self.recording.profile(Detail::Totals, Vec::new(), Some(Often::default())).await
    }

    /// Returns a profile of some moment between the call and its return, for the bearer of a token.
    ///
    /// # Errors
    /// See [`SourceError`].
    pub async fn profile(&self, token: usize, detail: Detail) -> Result<Held, SourceError> {
        self.profile_within(token, detail, self.most_held).await
    }

    /// Does the same for a request that has waited for this profile. It is never refused.
    ///
    /// # Errors
    /// See [`SourceError`].
    pub async fn second_profile(&self, token: usize, detail: Detail) -> Result<Held, SourceError> {
        self.profile_within(token, detail, usize::MAX).await
    }

    /// `most_held`: maximum number of different profiles with stacks that requests with the token may hold, with this
    /// one.
    async fn profile_within(&self, token: usize, detail: Detail, most_held: usize) -> Result<Held, SourceError> {
        let asked = Instant::now();
        // Totals are small, so they are not limited.
        let most_held = if detail == Detail::Totals { usize::MAX } else { most_held };
        let mut last = self.last[detail as usize].lock().await;
        let made = last.shared.clone().filter(|shared| shared.made.begun >= asked);
        if self.held_by(token, made.as_ref()) >= most_held {
            return Err(SourceError::Busy);
        }
        if let Some(shared) = made {
            return Ok(self.charged(token, detail, &shared));
        }
        // Drop the old profile first. Clients that still need it hold a reference.
        last.shared = None;
        if let Some(at) = last.not_before {
            tokio::time::sleep_until(at.into()).await;
        }
        // If the client leaves before the answer, the snapshot is taken all the same.
        last.not_before = Some(Instant::now() + PAUSE_AFTER_ABANDONED);
        let marks = match detail {
            Detail::Stacks => self.marks.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            Detail::Totals | Detail::Lifetimes => Vec::new(),
        };
        let made = self.recording.profile(detail, marks, None).await;
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
pub(crate) mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use heapbpf_profile::model::Profile;
    use heapbpf_profile::testing;
    use heapbpf_record::recent::Recent;
    use heapbpf_record::stats::Stats;
    use sampler_ebpf::abi::ProcessKey;

    use super::*;

    /// A profile as a recording hands it over, and the generations of its processes.
    pub(crate) fn finished(profile: Profile, keys: Vec<ProcessKey>) -> FinishedProfile {
        let (stats, recent, begun, cost) = (Stats::default(), Recent::default(), Instant::now(), Duration::ZERO);
        FinishedProfile { profile, stats, keys, recent, begun, cost, cpu: cost }
    }

    /// The only generation of a process.
    pub(crate) fn key(tgid: u32) -> ProcessKey {
        ProcessKey { start_ns: 5, tgid, exec_id: 0 }
    }

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
                let made = FinishedProfile { begun, ..finished(testing::small(), Vec::new()) };
                let _ = request.reply.send(Ok(made));
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
