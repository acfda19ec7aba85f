//! How far naming has come, for who waits for it in another thread.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Places (addresses in files) that have been looked up, of those that are asked for.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicUsize,
    of: AtomicUsize,
}

impl Progress {
    /// A batch of so many places begins.
    pub fn begin(&self, places: usize) {
        self.done.store(0, Ordering::Relaxed);
        self.of.store(places, Ordering::Relaxed);
    }

    /// So many more have been looked up.
    pub fn advance(&self, places: usize) {
        self.done.fetch_add(places, Ordering::Relaxed);
    }

    /// Looked up, and asked for, in the last batch.
    pub fn get(&self) -> (usize, usize) {
        let of = self.of.load(Ordering::Relaxed);
        (self.done.load(Ordering::Relaxed).min(of), of)
    }
}
