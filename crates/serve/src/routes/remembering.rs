//! Fills the history, and keeps profiles and their leak suspects, also if nobody asks for any.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use heapbpf_host::clock::thread_cpu_time;
use heapbpf_profile::report::growing;
use heapbpf_record::requests::{Detail, FinishedProfile, Unanswered};
use tokio::time::timeout;

use super::super::history;
use super::super::metrics::MOST_SUSPECTS;
use super::super::source::{Shared, SourceError};
use super::{Routes, ServerState, in_thread, page};

/// The time between two samples of the history, and between two of its profiles, is at least this many times the CPU
/// time of one.
const SHARE: u32 = 1000;
/// Maximum time between samples.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Minimum and maximum time between profiles that are kept when no page asks for any.
const PROFILES: [Duration; 2] = [Duration::from_secs(60), Duration::from_secs(600)];
/// Maximum time to wait for a profile that no page asks for. Names may take minutes, and clients wait meanwhile.
const PATIENCE: Duration = Duration::from_secs(5);

impl Routes {
    /// Fills the history until the recording ends.
    pub async fn remember(self) {
        tokio::join!(self.0.remember_totals(), self.0.remember_profiles());
    }

    /// Adds the totals at the end of the recording to the history. Later runs know them.
    pub fn remember_last(&self, last: &FinishedProfile) {
        history::end(&self.0.history, last, LONGEST_PAUSE);
    }
}

impl ServerState {
    /// Adds totals to the history until the recording ends.
    async fn remember_totals(&self) {
        let mut pause = history::EVERY;
        loop {
            let begun = Instant::now();
            match self.source.totals_unmeasured().await {
                Ok(made) => {
                    let cpu_before = thread_cpu_time();
                    self.history.lock().unwrap_or_else(PoisonError::into_inner).add(&made, pause);
                    let cost = made.cpu + thread_cpu_time().saturating_sub(cpu_before);
                    pause = (cost * SHARE).clamp(history::EVERY, LONGEST_PAUSE);
                }
                Err(Unanswered::Ended) => return,
                // The history has a gap there.
                Err(Unanswered::Busy | Unanswered::Failed) => {}
            }
            tokio::time::sleep_until((begun + pause).into()).await;
        }
    }

    /// Keeps profiles until the recording ends, also if no page asks for any.
    async fn remember_profiles(&self) {
        let mut pause = PROFILES[0];
        loop {
            let begun = Instant::now();
            // No request waits for it, so it counts against the first token for a moment only, and is never refused.
            match timeout(PATIENCE, self.source.second_profile(0, Detail::Stacks)).await {
                Ok(Ok(profile)) => {
                    self.keep(&profile);
                    let (kept, cpu) = (profile.kept(), profile.made.cpu);
                    drop(profile);
                    pause = next_pause(pause, Some(cpu + self.suspect(kept).await));
                }
                Ok(Err(SourceError::Unanswered(Unanswered::Ended))) => return,
                Ok(Err(SourceError::Unanswered(_) | SourceError::Busy)) => {}
                Err(_) => pause = next_pause(pause, None),
            }
            tokio::time::sleep_until((begun + pause).into()).await;
        }
    }

    /// Finds the leak suspects of a profile, and remembers them. Returns the CPU time that it took.
    async fn suspect(&self, profile: Arc<Shared>) -> Duration {
        let frames = self.frames;
        let found = in_thread((), move || {
            let cpu_before = thread_cpu_time();
            let growing = growing(&profile.made.profile, page::CONFIDENCE, frames, MOST_SUSPECTS).unwrap_or_default();
            (profile, growing, thread_cpu_time().saturating_sub(cpu_before))
        });
        // If it panicked, the last ones stay.
        let Ok((profile, growing, cpu)) = found.await else { return Duration::ZERO };
        *self.growing.lock().unwrap_or_else(PoisonError::into_inner) = Some((profile, growing));
        cpu
    }
}

/// The time between profiles after one that took this much CPU time; `None`: it was not ready in time, so what it takes
/// is not known.
fn next_pause(pause: Duration, cpu: Option<Duration>) -> Duration {
    let [shortest, longest] = PROFILES;
    cpu.map_or(pause * 2, |cpu| cpu * SHARE).clamp(shortest, longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_that_are_not_made_in_time_are_made_less_often() {
        let [shortest, longest] = PROFILES;
        let late = |pause: &Duration| Some(next_pause(*pause, None));
        let pauses: Vec<u64> =
            std::iter::successors(Some(shortest), late).take(6).map(|pause| pause.as_secs()).collect();
        assert_eq!(pauses, [60, 120, 240, 480, 600, 600]);
        assert_eq!(next_pause(longest, Some(Duration::from_millis(90))), Duration::from_secs(90));
        assert_eq!(next_pause(longest, Some(Duration::ZERO)), shortest);
    }
}
