//! Batches on disk, one numbered file each. When their total size exceeds the limit, the oldest are removed.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::batch::Batch;

/// Where batches wait on disk.
#[derive(Clone, Debug)]
pub struct SpoolOptions {
    /// The folder. Each destination has a subfolder of its own.
    pub folder: PathBuf,
    /// Maximum number of bytes that wait for one destination.
    pub most_bytes: u64,
}

/// Why the spool cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot keep profiles in the spool {folder}: {source}")]
pub struct SpoolError {
    folder: PathBuf,
    source: io::Error,
}

const EXTENSION: &str = "batch";
/// Name prefix of files that are being written. Such files found at the start are leftovers.
const UNFINISHED: &str = ".heapbpf-";
/// Lock file, held by the process that uses the folder.
const LOCK: &str = ".lock";

/// The batches of one destination.
#[derive(Debug)]
pub struct Spool {
    folder: PathBuf,
    most_bytes: u64,
    /// Sizes in bytes by file number.
    files: BTreeMap<u64, u64>,
    bytes: u64,
    next: u64,
    _lock: File,
}

impl Spool {
    /// Opens the destination's folder and finds the batches that wait there.
    ///
    /// # Errors
    /// The folder cannot be created, read or written, or another heapbpf uses it.
    pub fn open(options: &SpoolOptions, destination: &str) -> Result<Self, SpoolError> {
        let safe = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
        let folder = options.folder.join(destination.chars().map(safe).collect::<String>());
        let failed = |source| SpoolError { folder: folder.clone(), source };
        fs::create_dir_all(&folder).map_err(failed)?;
        let lock = File::create(folder.join(LOCK)).map_err(failed)?;
        lock.try_lock().map_err(|error| match error {
            fs::TryLockError::WouldBlock => failed(io::Error::other("another heapbpf pushes from there")),
            fs::TryLockError::Error(error) => failed(error),
        })?;
        // Only an attempt shows whether the folder is writable.
        tempfile::Builder::new().prefix(UNFINISHED).tempfile_in(&folder).map_err(failed)?;
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(&folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            if entry.file_name().as_encoded_bytes().starts_with(UNFINISHED.as_bytes()) {
                fs::remove_file(entry.path()).map_err(failed)?;
            } else if let Some(number) = number_of(&entry.path()) {
                files.insert(number, entry.metadata().map_err(failed)?.len());
            }
        }
        let (bytes, next) = (files.values().sum(), files.last_key_value().map_or(0, |(last, _)| last + 1));
        Ok(Self { folder, most_bytes: options.most_bytes, files, bytes, next, _lock: lock })
    }

    fn path(&self, number: u64) -> PathBuf {
        self.folder.join(format!("{number:012}.{EXTENSION}"))
    }

    /// Adds a batch. Returns how many older batches were dropped to make room.
    ///
    /// # Errors
    /// The batch could not be written (the disk is full), so it is lost itself.
    pub fn push(&mut self, batch: &Batch) -> io::Result<u64> {
        let bytes = batch.to_bytes();
        let size = bytes.len() as u64;
        let mut dropped = 0;
        while self.bytes + size > self.most_bytes
            && let Some(oldest) = self.files.first_key_value().map(|(number, _)| *number)
        {
            self.remove(oldest);
            dropped += 1;
        }
        if size > self.most_bytes {
            return Ok(dropped + 1);
        }
        let number = self.next;
        self.next += 1;
        let mut file = tempfile::Builder::new().prefix(UNFINISHED).tempfile_in(&self.folder)?;
        file.write_all(&bytes)?;
        file.persist(self.path(number)).map_err(|error| error.error)?;
        self.files.insert(number, size);
        self.bytes += size;
        Ok(dropped)
    }

    /// The oldest readable batch, and the number of unreadable ones before it, which are removed.
    pub fn first(&mut self) -> (Option<(u64, Batch)>, u64) {
        let mut unreadable = 0;
        while let Some(number) = self.files.first_key_value().map(|(number, _)| *number) {
            let batch = fs::read(self.path(number)).ok().and_then(|bytes| Batch::from_bytes(&bytes));
            if let Some(batch) = batch {
                return (Some((number, batch)), unreadable);
            }
            self.remove(number);
            unreadable += 1;
        }
        (None, unreadable)
    }

    /// Removes a batch. Returns whether it was there.
    pub fn remove(&mut self, number: u64) -> bool {
        let Some(size) = self.files.remove(&number) else { return false };
        self.bytes -= size;
        let path = self.path(number);
        if let Err(error) = fs::remove_file(&path) {
            log::warn!("cannot remove {}: {error}", path.display());
        }
        true
    }

    /// Number of waiting batches, and their bytes.
    pub fn waiting(&self) -> (u64, u64) {
        (self.files.len() as u64, self.bytes)
    }
}

fn number_of(path: &Path) -> Option<u64> {
    path.extension().filter(|extension| *extension == EXTENSION)?;
    path.file_stem()?.to_str()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(number: u8) -> Batch {
        Batch { path: "/".into(), content_type: "x".into(), body: vec![number; 1000] }
    }

    fn body(spool: &mut Spool) -> Option<u8> {
        spool.first().0.map(|(_, batch)| batch.body[0])
    }

    #[test]
    fn batches_outlive_the_process_in_order_and_disk_is_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let options = SpoolOptions { folder: folder.path().join("deep"), most_bytes: 5100 };
        let mut spool = Spool::open(&options, "otlp+http://c:4318/x").unwrap();
        let dropped: u64 = (0..20).map(|number| spool.push(&batch(number)).unwrap()).sum();
        assert_eq!((dropped, spool.waiting().0), (15, 5));
        let error = Spool::open(&options, "otlp+http://c:4318/x").unwrap_err();
        assert!(error.to_string().contains("another heapbpf"), "{error}");
        let rest = spool.folder.join(".heapbpf-Zx1");
        fs::write(&rest, "half of a batch").unwrap();
        drop(spool);
        let mut spool = Spool::open(&options, "otlp+http://c:4318/x").unwrap();
        assert!(!rest.exists());
        assert!(spool.waiting().1 <= 5100);
        for number in 15..20 {
            assert_eq!(body(&mut spool), Some(number));
            let (first, _) = spool.first();
            assert!(spool.remove(first.unwrap().0));
        }
        assert_eq!((body(&mut spool), spool.waiting()), (None, (0, 0)));
        // Another destination has a folder of its own.
        let mut other = Spool::open(&options, "http://other").unwrap();
        other.push(&batch(1)).unwrap();
        assert_eq!(body(&mut spool), None);
    }

    #[test]
    fn what_cannot_be_read_is_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let options = SpoolOptions { folder: folder.path().into(), most_bytes: 1 << 20 };
        let mut spool = Spool::open(&options, "x").unwrap();
        spool.push(&batch(1)).unwrap();
        spool.push(&batch(2)).unwrap();
        fs::write(spool.path(0), "broken").unwrap();
        fs::write(folder.path().join("x").join("notes.txt"), "not ours").unwrap();
        let (first, unreadable) = spool.first();
        assert_eq!((first.unwrap().1.body[0], unreadable), (2, 1));
        let error = Spool::open(&SpoolOptions { folder: "/proc/nowhere".into(), most_bytes: 1 }, "x").unwrap_err();
        assert!(error.to_string().contains("/proc/nowhere"));
    }
}
