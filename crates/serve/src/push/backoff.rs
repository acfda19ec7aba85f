//! Waiting times between attempts. They double each time and have jitter, so that a thousand hosts do not retry at
//! once.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(60);

/// Growing waiting times.
#[derive(Debug)]
pub struct Backoff {
    step: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { step: FIRST }
    }
}

impl Backoff {
    /// The next wait, between half of the current step and the whole step. `chance`, from 0 to 1, selects the point.
    pub fn next(&mut self, chance: f64) -> Duration {
        let wait = self.step.mul_f64(0.5 + 0.5 * chance.clamp(0.0, 1.0));
        self.step = (self.step * 2).min(LONGEST);
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_a_minute() {
        let mut backoff = Backoff::default();
        let waits: Vec<f64> = (0..10).map(|_| backoff.next(1.0).as_secs_f64()).collect();
        assert_eq!(waits, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]);
        assert_eq!(backoff.next(0.0).as_secs_f64(), 30.0);
    }
}
