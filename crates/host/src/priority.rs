//! A raised scheduling priority for a thread that others wait for.

use std::io;

/// Nice value while the priority is raised.
const NICE: libc::c_int = -15;

/// Raises the calling thread's scheduling priority until dropped, if that is permitted. Drop it in the same thread.
pub struct RaisedPriority {
    before: Option<libc::c_int>,
}

impl RaisedPriority {
    /// Raises the calling thread's priority, unless it is as high already.
    #[must_use]
    pub fn begin() -> Self {
        // SAFETY: `getpriority` takes integers only; 0 is the calling thread. A result of -1 is a nice value, too.
        let before = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        Self { before: (before > NICE && set(NICE).is_ok()).then_some(before) }
    }

    /// Whether it was this that raised the priority.
    #[must_use]
    pub const fn has_raised(&self) -> bool {
        self.before.is_some()
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
        assert!(!inner.has_raised());
        drop(inner);
        drop(outer);
        assert_eq!(nice(), before);
    }
}
