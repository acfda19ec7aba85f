//! Threads that keep every CPU busy, so that programs have to wait.

use std::ffi::OsStr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use crate::target::Target;

/// Threads per CPU. With two, running threads are preempted often.
const THREADS: usize = 2;

/// A busy machine, until it is dropped.
struct Busy {
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Busy {
    /// Keeps all CPUs busy from now on.
    fn begin() -> Self {
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

/// Starts this many programs side by side, each from the same command line. All CPUs are busy until the last is ready,
/// and the programs get only what is left.
///
/// # Panics
/// As [`Target::start_command`].
#[must_use]
pub fn start_starved(programs: usize, words: &[&OsStr]) -> Vec<Target> {
    let _busy = Busy::begin();
    let start = || Target::start_command(Command::new("nice").args(["-n", "19"]).args(words));
    std::thread::scope(|scope| {
        let started: Vec<_> = (0..programs).map(|_| scope.spawn(start)).collect();
        started.into_iter().map(|target| target.join().expect("it starts")).collect()
    })
}
