//! Hands profiles from the thread that gets them to the thread that shows them. Only the last one is kept, so a slow
//! terminal skips some and delays none.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use heapbpf_profile::{Profile, Row};
use heapbpf_record::requests::Detail;

/// The time between two refreshes is at least this many times the CPU time of one.
const SHARE: u32 = 80;
/// Maximum of that time.
const LONGEST: Duration = Duration::from_secs(10);
/// Minimum time between two profiles with lifetimes and resident memory, which cost more. At the beginning, when
/// processes may have been too young for a first reading, it is as long as the screen has been shown.
const LIFETIMES_EVERY: Duration = Duration::from_secs(10);
/// The time between two of them is at least this many times the CPU time of one.
const LIFETIMES_SHARE: u32 = 1000;
/// Maximum of that time.
const LIFETIMES_LONGEST: Duration = Duration::from_secs(60);
/// Minimum number of profiles without lifetimes between two with them. Their cost determines how often the screen may
/// be refreshed.
const LEAST_BETWEEN: u32 = 4;

/// What has happened since the last check.
#[derive(Default)]
pub struct News {
    /// Totals that arrived before the first profile.
    pub totals: Option<Arc<Profile>>,
    /// The last profile.
    pub profile: Option<Arc<Profile>>,
    /// Why there is currently no profile, or that there is one again.
    pub away: Option<Option<String>>,
    /// What processes had in use during the last hour; see `Top::remember`.
    pub past: Option<HashMap<String, Vec<f64>>>,
}

/// The connection between the two threads.
#[derive(Default)]
pub struct Feed {
    news: Mutex<News>,
    /// CPU time of showing the last profile, in microseconds.
    showing_us: AtomicU64,
    closed: AtomicBool,
    /// Notified when the feed is closed.
    ends: Condvar,
    /// A profile that is no longer shown.
    old: Mutex<Option<Arc<Profile>>>,
    /// Called after news has arrived.
    notify: Option<Box<dyn Fn() + Send + Sync>>,
}

/// A profile, and the cost of getting it.
pub struct Got {
    /// The profile.
    pub profile: Arc<Profile>,
    /// CPU time.
    pub cost: Duration,
}

/// Why there is no profile.
pub enum NoProfile {
    /// There will not be one.
    Ended,
    /// There may be one later.
    Later(String),
}

impl Feed {
    /// Creates a feed that calls `notify` after news has arrived.
    pub fn notifying(notify: impl Fn() + Send + Sync + 'static) -> Self {
        Self { notify: Some(Box::new(notify)), ..Self::default() }
    }

    /// Returns what has happened since the last call.
    pub fn news(&self) -> News {
        std::mem::take(&mut *self.news.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Records the CPU time of showing a profile.
    pub fn shown_in(&self, time: Duration) {
        self.showing_us.store(time.as_micros() as u64, Ordering::Relaxed);
    }

    /// Passes on what a service remembers.
    pub fn remember(&self, past: HashMap<String, Vec<f64>>) {
        self.publish(|news| news.past = Some(past));
    }

    /// Returns a profile that is no longer shown.
    pub fn give_back(&self, profile: Arc<Profile>) {
        *self.old.lock().unwrap_or_else(PoisonError::into_inner) = Some(profile);
    }

    /// Returns the rows of a profile that is no longer needed, if there is one, so that their memory can be reused.
    pub fn old_rows(&self) -> Vec<Row> {
        let old = self.old.lock().unwrap_or_else(PoisonError::into_inner).take();
        old.and_then(Arc::into_inner).map(|profile| profile.rows).unwrap_or_default()
    }

    /// Stops the feed: no more profiles are wanted.
    pub fn close(&self) {
        // Under the lock, so that nobody starts to wait in between.
        let _news = self.news.lock().unwrap_or_else(PoisonError::into_inner);
        self.closed.store(true, Ordering::Relaxed);
        self.ends.notify_all();
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    fn publish(&self, change: impl FnOnce(&mut News)) {
        change(&mut self.news.lock().unwrap_or_else(PoisonError::into_inner));
        self.notify.iter().for_each(|notify| notify());
    }

    /// Gets profiles until there are no more. `next` gets one of some detail.
    pub fn fill(&self, refresh: Duration, mut next: impl FnMut(Detail) -> Result<Got, NoProfile>) {
        // The first profile waits for names, which may take long; totals do not. If there are none, the profile says
        // why.
        if !self.is_closed()
            && let Ok(Got { profile, .. }) = next(Detail::Totals)
        {
            self.publish(|news| news.totals = Some(profile));
        }
        // When the last profile with lifetimes was requested, and how long to wait for the next one.
        let mut last_lifetimes: Option<(Instant, Duration)> = None;
        let (first, mut plain, mut plain_cost) = (Instant::now(), 0, None);
        while !self.is_closed() {
            let begun = Instant::now();
            let is_due = |(at, pause): (Instant, Duration)| at.elapsed() >= pause && plain >= LEAST_BETWEEN;
            let wants_lifetimes = last_lifetimes.is_none_or(is_due);
            let detail = if wants_lifetimes { Detail::Lifetimes } else { Detail::Stacks };
            let pause = match next(detail) {
                Ok(Got { profile, cost }) => {
                    if wants_lifetimes {
                        // The cost of the first one is mostly that of names, which later ones do not have.
                        let cost = if last_lifetimes.is_none() { Duration::ZERO } else { cost };
                        let least = begun.duration_since(first).min(LIFETIMES_EVERY);
                        let pause = (cost * LIFETIMES_SHARE).clamp(least, LIFETIMES_LONGEST);
                        (last_lifetimes, plain) = (Some((begun, pause)), 0);
                    } else {
                        (plain, plain_cost) = (plain + 1, Some(cost));
                    }
                    self.publish(|news| (news.profile, news.away) = (Some(profile), Some(None)));
                    let showing = Duration::from_micros(self.showing_us.load(Ordering::Relaxed));
                    // Profiles with lifetimes are rare, so their cost is not used.
                    ((plain_cost.unwrap_or_default() + showing) * SHARE).clamp(refresh, LONGEST.max(refresh))
                }
                Err(NoProfile::Ended) => return,
                Err(NoProfile::Later(why)) => {
                    self.publish(|news| news.away = Some(Some(why)));
                    refresh.max(Duration::from_secs(1))
                }
            };
            self.wait(pause.saturating_sub(begun.elapsed()));
        }
    }

    /// Waits for the pause, or until the feed is closed.
    fn wait(&self, pause: Duration) {
        let news = self.news.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.ends.wait_timeout_while(news, pause, |_| !self.is_closed()));
    }
}

#[cfg(test)]
mod tests {
    use heapbpf_profile::testing;

    use super::*;

    #[test]
    fn only_the_last_profile_is_kept_and_errors_are_told() {
        let feed = Feed::default();
        let mut answers = vec![
            Err(NoProfile::Ended),
            Err(NoProfile::Later("gone".into())),
            Ok(Got { profile: Arc::new(testing::ended_apart()), cost: Duration::ZERO }),
            // Names, which later profiles have at hand, do not delay these.
            Ok(Got { profile: Arc::new(testing::small()), cost: Duration::from_secs(3600) }),
            Ok(Got { profile: Arc::new(testing::small()), cost: Duration::ZERO }),
        ];
        let mut asked = Vec::new();
        feed.fill(Duration::ZERO, |detail| {
            asked.push(detail);
            answers.pop().expect("it ends")
        });
        let [totals, lifetimes, stacks] = [Detail::Totals, Detail::Lifetimes, Detail::Stacks];
        assert_eq!(asked, [totals, lifetimes, stacks, stacks, stacks], "lifetimes come seldom");
        let news = feed.news();
        assert!(news.totals.is_some());
        assert!(news.profile.is_some_and(|profile| profile.header.ended_apart));
        assert_eq!(news.away, Some(Some("gone".into())));
        assert!(feed.news().profile.is_none());
    }

    #[test]
    fn news_are_told_and_waiting_ends_when_the_feed_is_closed() {
        let (sender, notified) = std::sync::mpsc::channel();
        let feed = Arc::new(Feed::notifying(move || sender.send(()).expect("somebody listens")));
        let filled = Arc::clone(&feed);
        let got = || Ok(Got { profile: Arc::new(testing::small()), cost: Duration::ZERO });
        // The second profile would come after an hour.
        let filler = std::thread::spawn(move || filled.fill(Duration::from_secs(3600), |_| got()));
        notified.recv().expect("a profile");
        feed.close();
        filler.join().expect("it ends");
    }

    #[test]
    fn rows_are_used_again_when_nobody_needs_them() {
        let feed = Feed::default();
        assert!(feed.old_rows().is_empty());
        let profile = Arc::new(testing::small());
        feed.give_back(Arc::clone(&profile));
        assert!(feed.old_rows().is_empty(), "it is marked, for example");
        feed.give_back(profile);
        assert_eq!(feed.old_rows().len(), testing::small().rows.len());
    }

    #[test]
    fn a_closed_feed_asks_for_nothing() {
        let feed = Feed::default();
        feed.close();
        feed.fill(Duration::ZERO, |_| panic!("asked"));
    }
}
