//! A raised scheduling priority for the daemon: on a busy host, a cut must first take in everything that was sent.

use heapbpf_host::priority::RaisedPriority;

/// Time without a ring that fills up, after which the priority is reset.
const CALM_NS: u64 = 2_000_000_000;

/// A raised priority while a ring fills up: long stack copies arrive at hundreds of megabytes a second, and a daemon
/// that waits for a CPU loses them.
#[derive(Default)]
pub(super) struct Hurry {
    priority: Option<RaisedPriority>,
    until_ns: u64,
}

impl Hurry {
    /// Notes the state of the rings at a given moment (CLOCK_MONOTONIC).
    pub(super) fn look(&mut self, is_filling: bool, now_ns: u64) {
        if is_filling {
            self.until_ns = now_ns + CALM_NS;
            // If the priority was raised while another one was held, that one has lowered it again by now.
            if self.priority.as_ref().is_none_or(|priority| !priority.has_raised()) {
                self.priority = Some(RaisedPriority::begin());
            }
        } else if now_ns >= self.until_ns {
            self.priority = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_that_fills_up_raises_the_priority_for_a_while() {
        let mut hurry = Hurry::default();
        hurry.look(false, 1);
        assert!(hurry.priority.is_none());
        hurry.look(true, 2);
        hurry.look(false, 1 + CALM_NS);
        assert!(hurry.priority.is_some());
        hurry.look(false, 2 + CALM_NS);
        assert!(hurry.priority.is_none());
    }
}
