//! When a step may be tried again, and when the recording has to end.

use std::time::Duration;

use heapbpf_host::clock::monotonic_ns;

use super::errors::Step;
use super::state::Session;

/// Longest time without the kernel's counters. After that it is unknown what is missing from the figures, and the
/// recording ends with the profile so far.
const LONGEST_BLIND: Duration = Duration::from_secs(30);

impl Session {
    /// Tells the BPF programs whether the daemon sleeps. Returns whether that worked.
    pub(super) fn set_sleeping(&mut self, sleeps: bool) -> bool {
        if !sleeps && !self.unfinished.is_sleeping_set {
            return true;
        }
        if !self.may_try(Step::Sleep) {
            return false;
        }
        let outcome = self.attaching.control.set_sleeping(sleeps);
        let worked = self.errors.note(Step::Sleep, outcome, monotonic_ns()).is_some();
        if worked {
            self.unfinished.is_sleeping_set = sleeps;
        }
        worked
    }

    /// Whether a step may be tried now.
    pub(super) fn may_try(&self, step: Step) -> bool {
        self.errors.may_try(step, monotonic_ns())
    }

    /// Time until the oldest request can be answered; `None` without requests.
    pub(super) fn until_answer(&self) -> Option<Duration> {
        (!self.unfinished.requests.is_empty()).then(|| self.errors.until_retry(Step::Counters, monotonic_ns()))
    }

    /// Why the recording cannot go on, if it cannot.
    pub(super) fn must_end(&self) -> Option<String> {
        (self.errors.failing_for(Step::Counters, monotonic_ns()) >= LONGEST_BLIND).then(|| {
            format!(
                "the kernel's counters could not be read for {} s ({}), so what is missing from the figures is unknown",
                LONGEST_BLIND.as_secs(),
                self.errors.last(Step::Counters)
            )
        })
    }
}
