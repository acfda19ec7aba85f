//! Progress of symbolization, for another thread that waits for it.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use heapbpf_profile::units;

/// Number of addresses symbolized so far, and in total, in the current batch.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicUsize,
    of: AtomicUsize,
    download: Mutex<Option<Download>>,
}

impl fmt::Display for Download {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { build_id, received_bytes, of_bytes } = self;
        write!(formatter, "downloading the debug file {build_id}: {}", units::bytes(*received_bytes as f64))?;
        of_bytes.map_or(Ok(()), |of| write!(formatter, " of {}", units::bytes(of as f64)))
    }
}

/// A debug file that is being downloaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Download {
    /// Its build ID, hexadecimal.
    pub build_id: String,
    /// Bytes received so far.
    pub received_bytes: u64,
    /// Its size, if the server reported it.
    pub of_bytes: Option<u64>,
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

    /// Records how much of a file has been downloaded.
    pub fn download(&self, build_id: &str, received_bytes: u64, of_bytes: Option<u64>) {
        *self.lock() = Some(Download { build_id: build_id.to_owned(), received_bytes, of_bytes });
    }

    /// Records that nothing is being downloaded.
    pub fn end_download(&self) {
        *self.lock() = None;
    }

    /// Returns the file that is being downloaded.
    pub fn get_download(&self) -> Option<Download> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Download>> {
        self.download.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of finished addresses, and of all addresses, in the latest batch.
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

    #[test]
    fn a_download_is_told_while_it_lasts() {
        let progress = Progress::default();
        assert_eq!(progress.get_download(), None);
        progress.download("ab", 1, None);
        progress.download("ab", 2, Some(3));
        let download = Download { build_id: "ab".into(), received_bytes: 2, of_bytes: Some(3) };
        assert_eq!(
            (download.to_string().as_str(), progress.get_download()),
            ("downloading the debug file ab: 2 B of 3 B", Some(download))
        );
        progress.end_download();
        assert_eq!(progress.get_download(), None);
    }
}
