//! A raised scheduling priority for a thread that others wait for.

use rustix::process::{getpriority_process, setpriority_process};

/// Nice value while the priority is raised.
const NICE: i32 = -15;

/// Raises the calling thread's scheduling priority until dropped, if that is permitted. Drop it in the same thread.
pub struct RaisedPriority {
    before: Option<i32>,
}

impl RaisedPriority {
    /// Raises the calling thread's priority, unless it is as high already.
    #[must_use]
    pub fn begin() -> Self {
        let before = getpriority_process(None).ok().filter(|before| *before > NICE);
        Self { before: before.filter(|_| setpriority_process(None, NICE).is_ok()) }
    }

    /// Whether it was this that raised the priority.
    #[must_use]
    pub const fn has_raised(&self) -> bool {
        self.before.is_some()
    }
}

impl Drop for RaisedPriority {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.before.map(|before| setpriority_process(None, before)) {
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
