//! When a snapshot is due while the recording runs: after a time, at a size, at a peak, before a kill.

use std::time::{Duration, Instant};

use super::memory_limits::MemoryLimits;
use super::session::Session;
use crate::view::units;

/// Below this share of the threshold, passing it counts again.
const REARM: f64 = 0.9;
/// A new peak is worth a snapshot when it is that much above the last that was.
const PEAK_STEP: f64 = 1.1;
/// Time between snapshots of peaks: on the way up they follow each other closely.
const PEAK_PAUSE: Duration = Duration::from_secs(1);

/// What snapshots are due for.
#[derive(Clone, Copy, Debug, Default)]
pub struct TriggerOptions {
    /// Time between snapshots.
    pub every: Option<Duration>,
    /// Bytes in use at which there is one.
    pub at_bytes: Option<u64>,
    /// At each new peak of bytes in use.
    pub at_peak: bool,
    /// Before targets or the host run out of memory.
    pub at_limit: bool,
}

/// A threshold that is passed upwards.
#[derive(Clone, Copy, Debug)]
struct Threshold {
    bytes: f64,
    armed: bool,
}

impl Threshold {
    fn passed(&mut self, inuse_bytes: f64) -> bool {
        let passed = self.armed && inuse_bytes >= self.bytes;
        self.armed = if self.armed { !passed } else { inuse_bytes < self.bytes * REARM };
        passed
    }
}

/// Peaks worth a snapshot.
#[derive(Clone, Copy, Debug)]
struct Peaks {
    bytes: f64,
    next: Instant,
}

impl Peaks {
    fn passed(&mut self, inuse_bytes: f64, now: Instant) -> bool {
        let passed = now >= self.next && inuse_bytes > self.bytes * PEAK_STEP;
        if passed {
            *self = Self { bytes: inuse_bytes, next: now + PEAK_PAUSE };
        }
        passed
    }
}

/// All triggers of a recording.
pub struct Triggers {
    every: Option<(Duration, Instant)>,
    at_bytes: Option<Threshold>,
    peaks: Option<Peaks>,
    limits: Option<MemoryLimits>,
}

impl Triggers {
    /// The clock starts now.
    pub fn new(options: TriggerOptions, now: Instant) -> Self {
        Self {
            every: options.every.map(|every| (every, now + every)),
            at_bytes: options.at_bytes.map(|bytes| Threshold { bytes: bytes as f64, armed: true }),
            peaks: options.at_peak.then_some(Peaks { bytes: 0.0, next: now + PEAK_PAUSE }),
            limits: options.at_limit.then(MemoryLimits::new),
        }
    }

    /// Why a snapshot is due now, if it is. Several reasons at once are one snapshot.
    pub fn due(&mut self, session: &Session, now: Instant) -> Option<String> {
        let inuse = session.recorder.heap.estimated().inuse_bytes;
        let mut why = None;
        if let Some((every, next)) = &mut self.every
            && now >= *next
        {
            // After a standstill the next comes a whole step later.
            *next = (*next).max(now - *every) + *every;
            why = Some("at its time".to_owned());
        }
        if self.peaks.as_mut().is_some_and(|peaks| peaks.passed(inuse, now)) {
            why = Some(format!("at a new peak: {} in use", units::bytes(inuse)));
        }
        if self.at_bytes.as_mut().is_some_and(|threshold| threshold.passed(inuse)) {
            why = Some(format!("at its threshold: {} in use", units::bytes(inuse)));
        }
        if let Some(limits) = &mut self.limits {
            why = limits.due(now, session.target_pids()).map(|how| format!("before a kill: {how}")).or(why);
        }
        why
    }

    /// When to look again at the latest.
    pub fn next_look(&self) -> Option<Instant> {
        let limits = self.limits.as_ref().map(MemoryLimits::next_look);
        [self.every.map(|(_, next)| next), limits].into_iter().flatten().min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threshold_counts_again_after_it_was_left() {
        let mut threshold = Threshold { bytes: 100.0, armed: true };
        let passed = [50.0, 100.0, 150.0, 95.0, 101.0, 80.0, 100.0].map(|bytes| threshold.passed(bytes));
        assert_eq!(passed, [false, true, false, false, false, false, true]);
    }

    #[test]
    fn peaks_are_a_step_apart_in_bytes_and_time() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut peaks = Peaks { bytes: 0.0, next: start };
        let passed = [(0, 10.0), (10, 50.0), (1000, 10.5), (1001, 50.0), (5000, 54.0), (5001, 56.0)]
            .map(|(ms, bytes)| peaks.passed(bytes, at(ms)));
        assert_eq!(passed, [true, false, false, true, false, true]);
    }
}
