//! Who stops a process runs before others, so that the stop is short.

/// The highest priority of ordinary threads.
const HIGHEST_NICE: libc::c_int = -20;

/// The calling thread runs before all ordinary ones until this is dropped, in the same thread. A control group may have no
/// real-time priority to give: then it is the first among ordinary ones. Without the permission nothing changes.
#[derive(Debug)]
pub struct Raised {
    /// The nice value to go back to, if that was changed.
    nice: Option<libc::c_int>,
}

impl Raised {
    /// From now on.
    #[must_use]
    pub fn begin() -> Self {
        if set_policy(libc::SCHED_FIFO, 1) {
            return Self { nice: None };
        }
        // SAFETY: no pointers; 0 is the calling thread. A result of -1 is a nice value, too.
        let before = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        Self { nice: set_nice(HIGHEST_NICE).then_some(before) }
    }

    /// Whether it is a real-time priority.
    #[must_use]
    pub fn is_real_time(&self) -> bool {
        // SAFETY: no pointers; 0 is the calling thread.
        unsafe { libc::sched_getscheduler(0) & !libc::SCHED_RESET_ON_FORK == libc::SCHED_FIFO }
    }
}

impl Drop for Raised {
    fn drop(&mut self) {
        match self.nice {
            Some(nice) => set_nice(nice),
            None => set_policy(libc::SCHED_OTHER, 0),
        };
    }
}

/// Whether the calling thread has this policy and this real-time priority now.
fn set_policy(policy: libc::c_int, sched_priority: libc::c_int) -> bool {
    let parameters = libc::sched_param { sched_priority };
    // SAFETY: the kernel only reads the parameters; 0 is the calling thread.
    unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) == 0 }
}

fn set_nice(nice: libc::c_int) -> bool {
    // SAFETY: no pointers; 0 is the calling thread.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Policy and nice value of the calling thread.
    fn current() -> (libc::c_int, libc::c_int) {
        // SAFETY: no pointers; 0 is the calling thread.
        unsafe { (libc::sched_getscheduler(0), libc::getpriority(libc::PRIO_PROCESS, 0)) }
    }

    #[test]
    fn a_thread_is_raised_in_one_way_or_the_other_and_is_as_before_afterwards() {
        let before = current();
        let raised = Raised::begin();
        let (policy, nice) = current();
        let is_first = policy == libc::SCHED_FIFO || nice == HIGHEST_NICE;
        // SAFETY: no arguments.
        let is_root = unsafe { libc::geteuid() } == 0;
        assert!(is_first || !is_root, "policy {policy}, nice {nice}");
        drop(raised);
        assert_eq!(current(), before);
    }
}
