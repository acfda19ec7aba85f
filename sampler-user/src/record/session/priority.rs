//! A raised scheduling priority for the daemon: on a busy host, a cut must first take in everything that was sent.

use std::io;

/// Nice value while the priority is raised.
const NICE: libc::c_int = -15;

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

#[cfg(test)]
mod tests {
    use super::*;

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
