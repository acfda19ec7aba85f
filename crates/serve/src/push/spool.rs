//! Batches on disk, one numbered file each. If their total size exceeds the limit, the oldest are removed.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::ops::Bound::{Excluded, Unbounded};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::batch::Batch;
use super::own_dir::{OwnDir, SpoolError};

/// Where batches wait on disk.
#[derive(Clone, Debug)]
pub struct SpoolOptions {
    /// The directory. Each destination has its own subdirectory.
    pub dir: PathBuf,
    /// Maximum number of bytes that wait for one destination.
    pub most_bytes: u64,
}

/// What happened to a batch that was added.
#[derive(Debug)]
pub struct Pushed {
    /// Number of older batches dropped to make space.
    pub dropped: u64,
    /// Whether it waits to be delivered.
    pub kept: Result<(), NotKept>,
}

/// Why a batch was dropped immediately.
#[derive(Debug)]
pub enum NotKept {
    /// It is larger than the store, with its size in bytes.
    TooLarge(u64),
    /// It could not be written, for example because the disk is full.
    Io(io::Error),
}

const EXTENSION: &str = "batch";
/// Name prefix of files that are being written. Such files found at the start are leftovers.
const UNFINISHED: &str = ".heapbpf-";

/// The batches of one destination.
#[derive(Debug)]
pub struct Spool {
    pub(super) dir: OwnDir,
    /// Maximum number of bytes that wait.
    pub most_bytes: u64,
    /// Sizes in bytes by file number.
    files: BTreeMap<u64, u64>,
    bytes: u64,
    next: u64,
}

impl Spool {
    /// Opens the destination's directory and finds the batches that wait there.
    ///
    /// # Errors
    /// The directory cannot be created, read or written, or another heapbpf uses it.
    pub fn open(options: &SpoolOptions, destination: &str) -> Result<Self, SpoolError> {
        let safe = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
        let dir = OwnDir::open(&options.dir, &destination.chars().map(safe).collect::<String>())?;
        let failed = |source| SpoolError::Io { dir: dir.named.clone(), source };
        // Only an attempt shows whether the directory is writable.
        tempfile::Builder::new().prefix(UNFINISHED).tempfile_in(&dir.path).map_err(failed)?;
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(&dir.path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            if entry.file_name().as_encoded_bytes().starts_with(UNFINISHED.as_bytes()) {
                fs::remove_file(entry.path()).map_err(failed)?;
            } else if let Some(number) = number_of(&entry.path()) {
                files.insert(number, entry.metadata().map_err(failed)?.len());
            }
        }
        let (bytes, next) = (files.values().sum(), files.last_key_value().map_or(0, |(last, _)| last + 1));
        Ok(Self { dir, most_bytes: options.most_bytes, files, bytes, next })
    }

    fn path(&self, number: u64) -> PathBuf {
        self.dir.path.join(format!("{number:012}.{EXTENSION}"))
    }

    /// Number of the oldest batch.
    pub fn first_number(&self) -> Option<u64> {
        self.files.first_key_value().map(|(number, _)| *number)
    }

    /// Adds a batch. Drops the oldest ones to make space for it. A batch that is too large for the whole spool is
    /// dropped itself.
    pub fn push(&mut self, batch: &Batch) -> Pushed {
        let bytes = batch.to_bytes();
        let size = bytes.len() as u64;
        if size > self.most_bytes {
            return Pushed { dropped: 0, kept: Err(NotKept::TooLarge(size)) };
        }
        let mut dropped = 0;
        while self.bytes + size > self.most_bytes
            && let Some(oldest) = self.first_number()
        {
            self.remove(oldest);
            dropped += 1;
        }
        Pushed { dropped, kept: self.write(&bytes).map_err(NotKept::Io) }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let size = bytes.len() as u64;
        let number = self.next;
        self.next += 1;
        let mut file = tempfile::Builder::new().prefix(UNFINISHED).tempfile_in(&self.dir.path)?;
        file.write_all(bytes)?;
        // Otherwise the name could exist without the content after a machine crash.
        file.as_file().sync_all()?;
        file.persist(self.path(number)).map_err(|error| error.error)?;
        self.dir.open.sync_all()?;
        self.files.insert(number, size);
        self.bytes += size;
        Ok(())
    }

    /// Returns the oldest batch that can be read, and the number of files before it that hold none, which are removed.
    /// Files that cannot be read stay. The error is that of the first of them, if there is no batch.
    pub fn first(&mut self) -> (io::Result<Option<(u64, Batch)>>, u64) {
        let (mut after, mut removed, mut unreadable) = (Unbounded::<u64>, 0, None);
        while let Some((&number, &size)) = self.files.range((after, Unbounded)).next() {
            after = Excluded(number);
            // It may be larger than the spool: an earlier run may have had a larger limit.
            match read(&self.path(number), size) {
                Ok(bytes) => {
                    if let Some(batch) = bytes.and_then(|bytes| Batch::from_bytes(&bytes)) {
                        return (Ok(Some((number, batch))), removed);
                    }
                    self.remove(number);
                    removed += 1;
                }
                // The process can open no file now.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM)) => {
                    return (Err(error), removed);
                }
                Err(error) => unreadable = unreadable.or(Some(error)),
            }
        }
        (unreadable.map_or(Ok(None), Err), removed)
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

/// Reads a regular file, up to this size. Returns `None` if there is none.
fn read(path: &Path, most_bytes: u64) -> io::Result<Option<Vec<u8>>> {
    let file = match OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path) {
        // It is gone, or a link is in its place.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ELOOP)) => return Ok(None),
        opened => opened?,
    };
    if !file.metadata()?.is_file() {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    file.take(most_bytes).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

fn number_of(path: &Path) -> Option<u64> {
    path.extension().filter(|extension| *extension == EXTENSION)?;
    path.file_stem()?.to_str()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    use super::*;

    fn batch(number: u8) -> Batch {
        Batch { path: "/".into(), content_type: "x".into(), body: vec![number; 1000] }
    }

    /// Adds a batch that is kept. Returns how many older ones were dropped for it.
    fn pushed(spool: &mut Spool, number: u8) -> u64 {
        let Pushed { dropped, kept } = spool.push(&batch(number));
        kept.unwrap();
        dropped
    }

    fn body(spool: &mut Spool) -> Option<u8> {
        spool.first().0.unwrap().map(|(_, batch)| batch.body[0])
    }

    #[test]
    fn batches_outlive_the_process_in_order_and_disk_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let options = SpoolOptions { dir: dir.path().join("deep"), most_bytes: 5100 };
        let mut spool = Spool::open(&options, "otlp+http://c:4318/x").unwrap();
        let dropped: u64 = (0..20).map(|number| pushed(&mut spool, number)).sum();
        assert_eq!((dropped, spool.waiting().0), (15, 5));
        let error = Spool::open(&options, "otlp+http://c:4318/x").unwrap_err();
        assert!(error.to_string().contains("another heapbpf"), "{error}");
        let rest = options.dir.join("otlp_http___c_4318_x/.heapbpf-Zx1");
        fs::write(&rest, "half of a batch").unwrap();
        drop(spool);
        let mut spool = Spool::open(&options, "otlp+http://c:4318/x").unwrap();
        assert!(!rest.exists());
        assert!(spool.waiting().1 <= 5100);
        for number in 15..20 {
            assert_eq!(body(&mut spool), Some(number));
            let (first, _) = spool.first();
            assert!(spool.remove(first.unwrap().unwrap().0));
        }
        assert_eq!((body(&mut spool), spool.waiting()), (None, (0, 0)));
        // Another destination has its own directory.
        let mut other = Spool::open(&options, "http://other").unwrap();
        pushed(&mut other, 1);
        assert_eq!(body(&mut spool), None);
    }

    /// A file system in a file, mounted.
    struct Disk(tempfile::TempDir);

    impl Disk {
        fn new() -> Option<Self> {
            let disk = Self(tempfile::tempdir().unwrap());
            File::create(disk.0.path().join("image")).and_then(|image| image.set_len(16 << 20)).unwrap();
            fs::create_dir(disk.root()).unwrap();
            let made = Command::new("mkfs.ext4").args(["-q", "image"]).current_dir(disk.0.path()).status();
            (made.is_ok_and(|status| status.success()) && disk.mount()).then_some(disk)
        }

        fn root(&self) -> PathBuf {
            self.0.path().join("root")
        }

        fn mount(&self) -> bool {
            let mounted =
                Command::new("mount").args(["-o", "loop", "image", "root"]).current_dir(self.0.path()).output();
            mounted.is_ok_and(|mounted| mounted.status.success())
        }

        fn unmount(&self) -> bool {
            Command::new("umount").arg(self.root()).output().is_ok_and(|unmounted| unmounted.status.success())
        }

        /// Loses everything that is not on the disk yet. Returns whether that was possible.
        fn crash(&self) -> bool {
            const SHUTDOWN: libc::c_ulong = 0x8004_587d;
            let without_log = 2_u32;
            let root = File::open(self.root()).unwrap();
            // SAFETY: the request reads an integer, which outlives the call.
            let refused = unsafe { libc::ioctl(root.as_raw_fd(), SHUTDOWN, &raw const without_log) };
            drop(root);
            refused == 0 && self.unmount() && self.mount()
        }
    }

    impl Drop for Disk {
        fn drop(&mut self) {
            self.unmount();
        }
    }

    #[test]
    fn batches_outlive_a_crash_of_the_machine() {
        let Some(disk) = Disk::new() else { return heapbpf_testing::skipped("no file system can be made and mounted") };
        let options = SpoolOptions { dir: disk.root(), most_bytes: 1 << 20 };
        let mut spool = Spool::open(&options, "x").unwrap();
        (1..=3).for_each(|number| assert_eq!(pushed(&mut spool, number), 0));
        // Another file is synced to the disk, and with it all names.
        File::create(disk.root().join("another")).and_then(|file| file.sync_all()).unwrap();
        drop(spool);
        if !disk.crash() {
            return heapbpf_testing::skipped("the file system cannot be shut down");
        }
        let mut spool = Spool::open(&options, "x").unwrap();
        for number in 1..=3 {
            let (first, unreadable) = spool.first();
            let (at, first) = first.unwrap().expect("it was added");
            assert_eq!((first, unreadable), (batch(number), 0));
            assert!(spool.remove(at));
        }
    }

    #[test]
    fn what_is_too_large_for_the_spool_costs_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let mut options = SpoolOptions { dir: dir.path().into(), most_bytes: 3100 };
        let mut spool = Spool::open(&options, "x").unwrap();
        (1..=3).for_each(|number| assert_eq!(pushed(&mut spool, number), 0));
        let large = spool.push(&Batch { body: vec![9; 3100], ..batch(9) });
        assert!(large.dropped == 0 && matches!(large.kept, Err(NotKept::TooLarge(3104))), "{large:?}");
        assert_eq!((body(&mut spool), spool.waiting().0), (Some(1), 3));
        // What an earlier run kept is delivered whole, even if the spool is smaller now.
        drop(spool);
        options.most_bytes = 700;
        let mut spool = Spool::open(&options, "x").unwrap();
        assert_eq!(spool.first().0.unwrap().unwrap().1, batch(1));
    }

    impl Spool {
        /// Replaces a batch's file by one that every attempt to open ends with an error.
        pub(in super::super) fn make_unreadable(&self, number: u64) {
            fs::remove_file(self.path(number)).unwrap();
            UnixListener::bind(self.path(number)).unwrap();
        }
    }

    /// An error that says nothing about the files, such as EMFILE; here ENOTDIR.
    #[test]
    fn what_cannot_be_read_now_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let mut spool = Spool::open(&SpoolOptions { dir: dir.path().into(), most_bytes: 1 << 20 }, "x").unwrap();
        (1..=3).for_each(|number| assert_eq!(pushed(&mut spool, number), 0));
        let there = std::mem::replace(&mut spool.dir.path, "/dev/null".into());
        let (first, removed) = spool.first();
        assert_eq!((first.unwrap_err().raw_os_error(), removed, spool.waiting().0), (Some(libc::ENOTDIR), 0, 3));
        spool.dir.path = there;
        assert_eq!(body(&mut spool), Some(1));
        // What is no batch and never becomes one does not stay in the way.
        fs::remove_file(spool.path(0)).unwrap();
        fs::remove_file(spool.path(1)).unwrap();
        fs::create_dir(spool.path(1)).unwrap();
        assert_eq!((body(&mut spool), spool.waiting().0), (Some(3), 1));
        // What cannot be read stays, but not in the way.
        pushed(&mut spool, 4);
        spool.make_unreadable(2);
        let (first, removed) = spool.first();
        assert_eq!((first.unwrap().unwrap().0, removed, spool.waiting().0), (3, 0, 2));
        assert!(spool.remove(3));
        let (first, removed) = spool.first();
        assert_eq!((first.unwrap_err().raw_os_error(), removed, spool.waiting().0), (Some(libc::ENXIO), 0, 1));
    }

    #[test]
    fn what_is_no_batch_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let options = SpoolOptions { dir: dir.path().into(), most_bytes: 1 << 20 };
        let mut spool = Spool::open(&options, "x").unwrap();
        pushed(&mut spool, 1);
        pushed(&mut spool, 2);
        fs::write(spool.path(0), "broken").unwrap();
        fs::write(dir.path().join("x").join("notes.txt"), "not ours").unwrap();
        let (first, unreadable) = spool.first();
        assert_eq!((first.unwrap().unwrap().1.body[0], unreadable), (2, 1));
        let error = Spool::open(&SpoolOptions { dir: "/proc/nowhere".into(), most_bytes: 1 }, "x").unwrap_err();
        assert!(error.to_string().contains("/proc/nowhere"));
    }

    #[test]
    fn what_others_planted_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        // Everybody may write here.
        let shared = dir.path().join("shared");
        let victim = dir.path().join("victim");
        fs::create_dir(&shared).unwrap();
        fs::create_dir(&victim).unwrap();
        fs::set_permissions(&shared, fs::Permissions::from_mode(0o1777)).unwrap();
        let options = SpoolOptions { dir: shared.clone(), most_bytes: 1 << 20 };
        let refused = |destination: &str, why: &str| {
            let error = Spool::open(&options, destination).unwrap_err().to_string();
            assert!(error.contains(why) && error.contains("--spool"), "{error}");
        };
        symlink(&victim, shared.join("a")).unwrap();
        refused("a", "not a directory");
        symlink(dir.path().join("missing"), shared.join("b")).unwrap();
        refused("b", "not a directory");
        fs::create_dir(shared.join("c")).unwrap();
        fs::set_permissions(shared.join("c"), fs::Permissions::from_mode(0o777)).unwrap();
        refused("c", "others may write");
        // SAFETY: `geteuid` takes no arguments and cannot fail.
        if unsafe { libc::geteuid() } == 0 {
            fs::create_dir(shared.join("d")).unwrap();
            std::os::unix::fs::chown(shared.join("d"), Some(65534), None).unwrap();
            refused("d", "another user (uid 65534)");
            let link = dir.path().join("link");
            symlink(&victim, &link).unwrap();
            std::os::unix::fs::lchown(&link, Some(65534), None).unwrap();
            let error = Spool::open(&SpoolOptions { dir: link, most_bytes: 1 }, "x").unwrap_err().to_string();
            assert!(error.contains("symbolic link of another user"), "{error}");
        }
        // A link inside our own directory, however it got there.
        let mut spool = Spool::open(&options, "e").unwrap();
        assert_eq!(fs::metadata(shared.join("e")).unwrap().mode() & 0o777, 0o700);
        fs::write(victim.join("kept"), "secret").unwrap();
        symlink(victim.join("kept"), shared.join("e/000000000000.batch")).unwrap();
        pushed(&mut spool, 1);
        assert_eq!(body(&mut spool), Some(1));
        // The directory's name now leads elsewhere; we stay with the directory.
        fs::rename(shared.join("e"), shared.join("moved")).unwrap();
        symlink(&victim, shared.join("e")).unwrap();
        pushed(&mut spool, 2);
        drop(spool);
        fs::remove_file(shared.join("moved/.lock")).unwrap();
        symlink(victim.join("made"), shared.join("moved/.lock")).unwrap();
        assert!(Spool::open(&options, "moved").is_err());
        assert_eq!(fs::read_dir(&victim).unwrap().count(), 1);
        assert_eq!(fs::read_to_string(victim.join("kept")).unwrap(), "secret");
        assert_eq!(fs::read_dir(shared.join("moved")).unwrap().count(), 3, "two batches and the lock");
    }
}
