//! A raised scheduling priority for the daemon: on a busy host, a cut must first take in everything that was sent.

use std::io;

/// Nice value while the priority is raised.
const NICE: libc::c_int = -15;

/// Time without a ring that fills up, after which the priority is reset.
const CALM_NS: u64 = 2_000_000_000;

/// Raises the calling thread's scheduling priority until dropped, if that is permitted.
pub(super) struct RaisedPriority {
    before: Option<libc::c_int>,
}

impl RaisedPriority {
    pub(super) fn begin() -> Self {
        // SAFETY: `getpriority` takes integers only; 0 is the calling thread. A result of -1 is a nice value, too.
        let before = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        Self { before: (before > NICE && set(NICE).is_ok()).then_some(before) }
    }
}

fn set(nice: libc::c_int) -> io::Result<()> {
    // SAFETY: `setpriority` takes integers only; 0 is the calling thread.
    let status = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

impl Drop for RaisedPriority {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.before.map(set) {
            log::warn!("cannot lower the daemon's priority again: {error}");
        }
    }
}

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
            if self.priority.as_ref().is_none_or(|priority| priority.before.is_none()) {
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

    #[test]
    fn the_priority_is_as_before_afterwards() {
        // SAFETY: `getpriority` takes integers only.
        let nice = || unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        let before = nice();
        let outer = RaisedPriority::begin();
        let inner = RaisedPriority::begin();
        assert!(nice() == NICE || nice() == before, "{}", nice());
        drop(inner);
        drop(outer);
        assert_eq!(nice(), before);
    }
}
