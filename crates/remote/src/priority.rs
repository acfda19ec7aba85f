//! Raises the priority of the thread that stops a process, so that it runs soon after it wakes and the stop is short.

/// The highest priority of ordinary threads.
const HIGHEST_NICE: libc::c_int = -20;

/// Shortest time slice of an ordinary thread, in nanoseconds. Since Linux 6.12 a waking thread at once preempts one
/// with a longer slice (85e511df3cec); otherwise even the thread with the best nice value may wait for milliseconds.
/// Older kernels ignore the value.
const SHORTEST_TURN_NS: u64 = 100_000;

/// While this exists, its thread runs before all ordinary ones. Drop it in the same thread. If the control group has no
/// real-time priority to give, the thread gets the best ordinary priority instead. Without the permission nothing
/// changes.
#[derive(Debug)]
pub struct Raised {
    /// The attributes to restore, if they were changed.
    before: Option<libc::sched_attr>,
}

impl Raised {
    /// Raises the calling thread's priority from now on.
    #[must_use]
    pub fn begin() -> Self {
        let before = attributes();
        let real_time = libc::sched_param { sched_priority: 1 };
        // SAFETY: the kernel only reads the parameters; 0 is the calling thread.
        let is_real_time = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const real_time) == 0 };
        let is_raised = is_real_time || {
            let first = |before: libc::sched_attr| {
                set(&libc::sched_attr { sched_nice: HIGHEST_NICE, sched_runtime: SHORTEST_TURN_NS, ..before })
            };
            before.is_some_and(first)
        };
        Self { before: before.filter(|_| is_raised) }
    }
}

impl Drop for Raised {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            set(before);
        }
    }
}

/// The scheduling attributes of the calling thread.
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
    // SAFETY: the kernel only reads the attributes, which contain their size; 0 is the calling thread.
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
