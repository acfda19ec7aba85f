//! Runs work that waits for the kernel on several threads at once.

use std::sync::{Mutex, PoisonError};

/// Maximum number of threads for work that mostly waits.
const MOST_WAITING: usize = 32;

/// Calls `work` for each item, with as many threads as there are processors. Items are started in order.
pub fn on_all_processors<T: Send>(items: Vec<T>, work: impl Fn(T) + Sync) {
    let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    by_threads(processors, items, work);
}

/// Calls `work` for each item, with many threads, because they mostly wait.
pub fn while_waiting<T: Send>(items: Vec<T>, work: impl Fn(T) + Sync) {
    by_threads(MOST_WAITING, items, work);
}

fn by_threads<T: Send>(most: usize, items: Vec<T>, work: impl Fn(T) + Sync) {
    let threads = most.min(items.len());
    let items = Mutex::new(items.into_iter());
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    let all = || {
        while let Some(item) = next() {
            work(item);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // If it cannot be started, the others do its share.
            let _ = std::thread::Builder::new().spawn_scoped(scope, all);
        }
        all();
    });
}

/// Number of online processors, including those outside this process's affinity.
pub fn online_processors() -> usize {
    // SAFETY: `sysconf` takes a plain integer and touches no memory of ours.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_item_is_worked_on_once() {
        for count in [0, 1, 1000] {
            let done = Mutex::new(Vec::new());
            while_waiting((0..count).collect(), |item: i32| done.lock().unwrap().push(item));
            on_all_processors((count..2 * count).collect(), |item| done.lock().unwrap().push(item));
            let mut done = done.into_inner().unwrap();
            done.sort_unstable();
            assert!(done.into_iter().eq(0..2 * count));
        }
    }

    #[test]
    fn they_work_at_the_same_time() {
        // Each waits for all others. One after the other, they would wait forever.
        let barrier = std::sync::Barrier::new(MOST_WAITING);
        while_waiting(vec![(); MOST_WAITING], |()| {
            barrier.wait();
        });
    }
}
