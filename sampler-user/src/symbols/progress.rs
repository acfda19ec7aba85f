//! Progress of symbolization, for another thread that waits for it.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of addresses symbolized so far, and in total, in the current batch.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicUsize,
    of: AtomicUsize,
}

impl Progress {
    /// Begins a batch of this many addresses.
    pub fn begin(&self, addresses: usize) {
        self.done.store(0, Ordering::Relaxed);
        self.of.store(addresses, Ordering::Relaxed);
    }

    /// Counts this many more addresses as done.
    pub fn advance(&self, addresses: usize) {
        self.done.fetch_add(addresses, Ordering::Relaxed);
    }

    /// Addresses done, and all addresses, of the latest batch.
    pub fn get(&self) -> (usize, usize) {
        let of = self.of.load(Ordering::Relaxed);
        (self.done.load(Ordering::Relaxed).min(of), of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_never_exceeds_the_batch() {
        let progress = Progress::default();
        assert_eq!(progress.get(), (0, 0));
        progress.begin(3);
        progress.advance(2);
        assert_eq!(progress.get(), (2, 3));
        progress.advance(2);
        assert_eq!(progress.get(), (3, 3));
        progress.begin(1);
        assert_eq!(progress.get(), (0, 1));
    }
}
