//! When a recording began, and when it ends.

use std::time::{Duration, SystemTime};

use heapbpf_host::clock::monotonic_ns;
use heapbpf_host::priority::RaisedPriority;

/// How long before its end a recording raises its scheduling priority.
const LAST_MOMENTS: Duration = Duration::from_millis(50);
/// Longest time to hook or release a process. It took up to 110 ms on two busy CPUs, and must not make a recording
/// longer.
const LONGEST_HOOKING: Duration = Duration::from_millis(150);

/// The times of a recording. Those in nanoseconds are CLOCK_MONOTONIC.
pub(super) struct Schedule {
    /// Wall clock at its start.
    pub(super) started: SystemTime,
    /// The same moment in nanoseconds.
    pub(super) started_ns: u64,
    /// When it ends, if known.
    pub(super) ends_ns: Option<u64>,
    /// The raised priority of the last moments, so that the recording ends on time.
    last_moments: Option<RaisedPriority>,
}

impl Schedule {
    /// A recording that begins now and whose end is unknown.
    pub(super) fn begin() -> Self {
        Self { started: SystemTime::now(), started_ns: monotonic_ns(), ends_ns: None, last_moments: None }
    }

    /// Sets the start to now, and the end if there is a duration.
    pub(super) fn restart(&mut self, duration: Option<Duration>) {
        (self.started, self.started_ns) = (SystemTime::now(), monotonic_ns());
        self.ends_ns = duration.map(|duration| self.started_ns.saturating_add(duration.as_nanos() as u64));
    }

    /// When hooking and releasing stop, if the recording ends at a set time.
    pub(super) fn last_hooking_ns(&self) -> Option<u64> {
        let ends_ns = self.ends_ns?;
        let duration = Duration::from_nanos(ends_ns.saturating_sub(self.started_ns));
        let before = LONGEST_HOOKING.min(duration / 10);
        Some(ends_ns.saturating_sub(before.as_nanos() as u64))
    }

    /// Time until the recording ends, if known; zero if it has ended.
    pub(super) fn until_end(&self, now_ns: u64) -> Option<Duration> {
        self.ends_ns.map(|ends_ns| Duration::from_nanos(ends_ns.saturating_sub(now_ns)))
    }

    /// Whether the recording's time is over.
    pub(super) fn has_ended(&self, now_ns: u64) -> bool {
        self.until_end(now_ns).is_some_and(|left| left.is_zero())
    }

    /// Time until the recording's last moments, if known and if they have not begun.
    pub(super) fn until_last_moments(&self, now_ns: u64) -> Option<Duration> {
        let left = self.until_end(now_ns).filter(|_| self.last_moments.is_none());
        left.map(|left| left.saturating_sub(LAST_MOMENTS))
    }

    /// Raises this thread's priority if the recording ends soon, so that it also ends on time on a busy host.
    pub(super) fn note_last_moments(&mut self, now_ns: u64) {
        if self.until_last_moments(now_ns).is_some_and(|left| left.is_zero()) {
            self.last_moments = Some(RaisedPriority::begin());
        }
    }

    /// Resets this thread's priority: the recording has ended.
    pub(super) fn last_moments_are_over(&mut self) {
        self.last_moments = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    fn schedule(duration: Option<Duration>) -> Schedule {
        let started_ns = 7 * SECOND_NS;
        let ends_ns = duration.map(|duration| started_ns + duration.as_nanos() as u64);
        Schedule { started: SystemTime::UNIX_EPOCH, started_ns, ends_ns, last_moments: None }
    }

    #[test]
    fn the_end_is_counted_down_and_stays_reached() {
        let schedule = schedule(Some(Duration::from_secs(2)));
        assert_eq!(schedule.until_end(8 * SECOND_NS), Some(Duration::from_secs(1)));
        assert!(!schedule.has_ended(9 * SECOND_NS - 1));
        for now_ns in [9 * SECOND_NS, 20 * SECOND_NS] {
            assert_eq!(schedule.until_end(now_ns), Some(Duration::ZERO));
            assert!(schedule.has_ended(now_ns));
        }
    }

    #[test]
    fn without_a_duration_nothing_ends() {
        let mut schedule = schedule(None);
        assert_eq!((schedule.until_end(u64::MAX), schedule.until_last_moments(u64::MAX)), (None, None));
        assert_eq!(schedule.last_hooking_ns(), None);
        schedule.note_last_moments(u64::MAX);
        assert!(!schedule.has_ended(u64::MAX) && schedule.last_moments.is_none());
    }

    #[test]
    fn the_last_moments_come_once() {
        let mut schedule = schedule(Some(Duration::from_secs(2)));
        let before_ns = 9 * SECOND_NS - LAST_MOMENTS.as_nanos() as u64 - 1;
        assert_eq!(schedule.until_last_moments(before_ns), Some(Duration::from_nanos(1)));
        schedule.note_last_moments(before_ns);
        assert!(schedule.last_moments.is_none());
        schedule.note_last_moments(before_ns + 1);
        assert!(schedule.last_moments.is_some());
        assert_eq!(schedule.until_last_moments(before_ns + 1), None, "nothing to wait for any more");
        schedule.last_moments_are_over();
        assert!(schedule.last_moments.is_none());
    }

    #[test]
    fn nothing_is_hooked_right_before_the_end_of_a_short_recording_either() {
        let until_ns = |duration| schedule(Some(duration)).last_hooking_ns().map(|at| at - 7 * SECOND_NS);
        assert_eq!(until_ns(Duration::from_secs(10)), Some(9_850_000_000));
        assert_eq!(until_ns(Duration::from_millis(100)), Some(90_000_000));
    }
}
