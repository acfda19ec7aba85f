//! Triggers of snapshots during a recording: after a time, at a size, at a peak, before an out-of-memory kill.

use std::time::{Duration, Instant};

use heapbpf_profile::units;

use super::memory_limits::MemoryLimits;
use crate::plan::TriggerOptions;

/// Below this share of the threshold, the trigger is armed again.
const REARM: f64 = 0.9;
/// A new peak triggers a snapshot if it is this many times the last peak that did.
const PEAK_STEP: f64 = 1.1;
/// Minimum time between snapshots of peaks: while memory grows, peaks follow each other closely.
const PEAK_PAUSE: Duration = Duration::from_secs(1);

/// A threshold that triggers when it is passed upwards.
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

/// Peaks that trigger snapshots.
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
    /// Creates the triggers. The clock starts now.
    pub fn new(options: TriggerOptions, now: Instant) -> Self {
        Self {
            every: options.every.map(|every| (every, now + every)),
            at_bytes: options.at_bytes.map(|bytes| Threshold { bytes: bytes as f64, armed: true }),
            peaks: options.at_peak.then_some(Peaks { bytes: 0.0, next: now + PEAK_PAUSE }),
            limits: options.at_limit.then(MemoryLimits::new),
        }
    }

    /// The reason for a snapshot, if one is due now. Several triggers at once make one snapshot, and only the last is
    /// reported. `inuse`: estimated bytes in use; `targets`: process ids of live targets.
    pub fn due(&mut self, inuse: f64, targets: impl Iterator<Item = u32>, now: Instant) -> Option<String> {
        let mut why = None;
        if let Some((every, next)) = &mut self.every
            && now >= *next
        {
            // After a pause of heapbpf, the next snapshot comes a whole interval later.
            *next = (*next).max(now - *every) + *every;
            why = Some("on schedule (--every)".to_owned());
        }
        if self.peaks.as_mut().is_some_and(|peaks| peaks.passed(inuse, now)) {
            why = Some(format!("at a new peak: {} in use", units::bytes(inuse)));
        }
        if self.at_bytes.as_mut().is_some_and(|threshold| threshold.passed(inuse)) {
            why = Some(format!("at the threshold: {} in use", units::bytes(inuse)));
        }
        if let Some(limits) = &mut self.limits {
            why = limits.due(now, targets).map(|how| format!("under memory pressure: {how}")).or(why);
        }
        why
    }

    /// The latest time for the next check.
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

    #[test]
    fn several_triggers_at_once_are_one_snapshot_and_the_last_one_is_reported() {
        let start = Instant::now();
        let options = TriggerOptions {
            every: Some(Duration::from_secs(10)),
            at_bytes: Some(1 << 20),
            at_peak: true,
            ..TriggerOptions::default()
        };
        let mut triggers = Triggers::new(options, start);
        let due = |triggers: &mut Triggers, seconds: u64, inuse| {
            triggers.due(inuse, std::iter::empty(), start + Duration::from_secs(seconds))
        };
        assert_eq!(due(&mut triggers, 0, 0.0), None);
        let why = due(&mut triggers, 10, 2.0 * 1_048_576.0).unwrap();
        assert_eq!(why, "at the threshold: 2.00 MiB in use");
        assert_eq!(due(&mut triggers, 11, 2.0 * 1_048_576.0), None, "each of them was served");
        assert_eq!(triggers.next_look(), Some(start + Duration::from_secs(20)));
        // After a pause of heapbpf, the next snapshot comes a whole interval later.
        assert_eq!(due(&mut triggers, 47, 0.0).as_deref(), Some("on schedule (--every)"));
        assert_eq!(triggers.next_look(), Some(start + Duration::from_secs(47)));
    }
}
