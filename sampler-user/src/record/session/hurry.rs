//! A moment in which the daemon goes before others on the CPU: a recording that is to be cut must first take in what a busy
//! host has sent.

use std::io;

/// Nice value while in a hurry.
const NICE: libc::c_int = -15;

/// Until it is dropped, the calling thread is scheduled before those of usual priority, if that is permitted.
pub(super) struct Hurry {
    before: Option<libc::c_int>,
}

impl Hurry {
    pub(super) fn begin() -> Self {
        // SAFETY: plain numbers; 0 is the calling thread. An answer of -1 is a nice value, too.
        let before = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        Self { before: (before > NICE && set(NICE).is_ok()).then_some(before) }
    }
}

fn set(nice: libc::c_int) -> io::Result<()> {
    // SAFETY: plain numbers; 0 is the calling thread.
    let status = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

impl Drop for Hurry {
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
        // SAFETY: plain numbers.
        let nice = || unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        let before = nice();
        let outer = Hurry::begin();
        let inner = Hurry::begin();
        assert!(nice() == NICE || nice() == before, "{}", nice());
        drop(inner);
        drop(outer);
        assert_eq!(nice(), before);
    }
}
