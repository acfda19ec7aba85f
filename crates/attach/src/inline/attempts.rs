//! Decides when to try again to hook a process that could not be stopped, or that changed during the attempt. Pure.

use std::time::Duration;

/// Pauses before further attempts, in ms. Usually a thread did not get a CPU in time.
const PAUSES_MS: [u64; 11] = [10, 20, 50, 100, 200, 500, 1000, 1000, 2000, 4000, 4000];
/// Attempts after pauses of at most this length spare calls that a stop may end early. The last of them comes after 0.9
/// s. Such a call can last as long as the reader of a pipe likes.
pub(super) const SPARED_FOR: Duration = Duration::from_millis(500);

/// Attempts for one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attempts {
    failed: usize,
}

impl Attempts {
    /// Whether the next attempt still spares calls that a stop may end early.
    pub(super) fn spares_calls(self) -> bool {
        PAUSES_MS.iter().take(self.failed).all(|pause| Duration::from_millis(*pause) <= SPARED_FOR)
    }

    /// Time from the last failed attempt to the last one that may follow.
    pub(super) fn left(self) -> Duration {
        PAUSES_MS.iter().skip(self.failed.saturating_sub(1)).copied().map(Duration::from_millis).sum()
    }

    /// Notes a failed attempt. Returns the time until the next one. `None` if there is none.
    pub fn failed(&mut self) -> Option<Duration> {
        let pause = PAUSES_MS.get(self.failed).copied().map(Duration::from_millis);
        self.failed += 1;
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_end_after_seconds() {
        let mut attempts = Attempts::default();
        let pauses: Vec<Duration> = std::iter::from_fn(|| attempts.failed()).collect();
        assert!(pauses.is_sorted());
        assert_eq!((pauses.len(), pauses.iter().sum()), (PAUSES_MS.len(), Duration::from_millis(12_880)));
        assert_eq!(attempts.failed(), None);
    }

    #[test]
    fn calls_are_spared_for_almost_a_second() {
        let mut attempts = Attempts::default();
        let mut waited = Duration::ZERO;
        while attempts.spares_calls() {
            waited += attempts.failed().expect("it is early");
        }
        assert_eq!(waited, Duration::from_millis(1880), "the last pause comes after the last attempt that spares them");
        assert_eq!(attempts.left(), Duration::from_secs(12));
    }
}
