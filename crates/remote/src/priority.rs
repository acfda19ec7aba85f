//! Who stops a process runs before others, so that the stop is short, and soon after they wake.

/// The highest priority of ordinary threads.
const HIGHEST_NICE: libc::c_int = -20;

/// The shortest turn of an ordinary thread, in nanoseconds. Since Linux 6.12 a thread that wakes takes the CPU at once from one with a
/// longer turn (85e511df3cec); to others, even the first among them may wait for milliseconds. Older kernels ignore it.
const SHORTEST_TURN_NS: u64 = 100_000;

/// The calling thread runs before all ordinary ones until this is dropped, in the same thread. A control group may have no
/// real-time priority to give: then it is the first among ordinary ones. Without the permission nothing changes.
#[derive(Debug)]
pub struct Raised {
    /// What to go back to, if that was changed.
    before: Option<libc::sched_attr>,
}

impl Raised {
    /// From now on.
    #[must_use]
    pub fn begin() -> Self {
        let before = attributes();
        let is_raised = set_policy(libc::SCHED_FIFO, 1) || {
            let first = |before: libc::sched_attr| {
                set(&libc::sched_attr { sched_nice: HIGHEST_NICE, sched_runtime: SHORTEST_TURN_NS, ..before })
            };
            before.is_some_and(first)
        };
        Self { before: before.filter(|_| is_raised) }
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
        if let Some(before) = &self.before {
            set(before);
        }
    }
}

/// Whether the calling thread has this policy and this real-time priority now.
fn set_policy(policy: libc::c_int, sched_priority: libc::c_int) -> bool {
    let parameters = libc::sched_param { sched_priority };
    // SAFETY: the kernel only reads the parameters; 0 is the calling thread.
    unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) == 0 }
}

/// How the calling thread is scheduled.
fn attributes() -> Option<libc::sched_attr> {
    let mut attributes = libc::sched_attr {
        size: 0,
        sched_policy: 0,
        sched_flags: 0,
        sched_nice: 0,
        sched_priority: 0,
        sched_runtime: 0,
        sched_deadline: 0,
        sched_period: 0,
    };
    let size = size_of::<libc::sched_attr>();
    // SAFETY: the kernel writes at most `size` bytes, which `attributes` has; 0 is the calling thread.
    let read = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
    (read == 0).then_some(attributes)
}

fn set(attributes: &libc::sched_attr) -> bool {
    // SAFETY: the kernel only reads the attributes, whose size they tell; 0 is the calling thread.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, std::ptr::from_ref(attributes), 0) == 0 }
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
