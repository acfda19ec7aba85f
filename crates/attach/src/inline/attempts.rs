//! When to try again to hook a process that could not be stopped, or changed meanwhile. Pure.

use std::time::Duration;

/// Time before each further attempt, ms: mostly, a thread found no free CPU in time.
const PAUSES_MS: [u64; 11] = [10, 20, 50, 100, 200, 500, 1000, 1000, 2000, 4000, 4000];

/// Attempts at one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Attempts {
    failed: usize,
}

impl Attempts {
    /// Notes a failed attempt. Time until the next one; `None` if there is none.
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
}
