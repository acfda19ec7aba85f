//! Threads that keep every CPU busy, so that other threads have to wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Threads per CPU. With two, running threads are preempted often.
const THREADS: usize = 2;

/// A busy machine, until it is dropped.
#[derive(Debug)]
pub struct Busy {
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Busy {
    /// Keeps all CPUs busy from now on.
    #[must_use]
    pub fn begin() -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let burn = |_| {
            let is_over = Arc::clone(&is_over);
            std::thread::spawn(move || while !is_over.load(Ordering::Relaxed) {})
        };
        let threads = (0..THREADS * processors).map(burn).collect();
        Self { is_over, threads }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A thread that only spins cannot have panicked.
            let _ = thread.join();
        }
    }
}
