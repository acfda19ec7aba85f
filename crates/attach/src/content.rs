//! Detects whether a file has changed, by its attributes and by the kernel's notifications of writes.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};

use crate::files::FileKey;

/// The state of a file's content, as far as it is known without reading the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Content {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Content {
    /// Reads the state of an open file.
    pub(crate) fn of(file: &File) -> io::Result<Self> {
        let data = file.metadata()?;
        Ok(Self {
            device: data.dev(),
            inode: data.ino(),
            bytes: data.len(),
            modified: (data.mtime(), data.mtime_nsec()),
            changed: (data.ctime(), data.ctime_nsec()),
        })
    }

    /// Whether an open file has been written to since this was its state. False if that is not known.
    pub(crate) fn was_written(then: Option<Self>, file: &File) -> bool {
        then.zip(Self::of(file).ok()).is_some_and(|(then, now)| !then.is_unwritten(&now))
    }

    /// Whether a file is the same and unchanged, if it had this device and inode before. Through an overlay mount it
    /// has others.
    pub(crate) fn is_unchanged(&self, now: &Self) -> bool {
        self.is_unwritten(now) && self.changed == now.changed
    }

    /// Whether a file that has been open ever since has not been written to. New names or owners do not change its
    /// content.
    pub(crate) fn is_unwritten(&self, now: &Self) -> bool {
        (self.bytes, self.modified) == (now.bytes, now.modified)
    }
}

/// Reports which of some files are written to. If there is no descriptor for it, nothing is reported.
#[derive(Debug)]
pub(crate) struct Watch {
    inotify: Option<OwnedFd>,
    watched: HashMap<i32, FileKey>,
}

impl Watch {
    /// Creates a watch without any files.
    pub(crate) fn new() -> Self {
        let inotify = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC);
        let inotify = inotify.inspect_err(|error| log::info!("no file can be watched for writes: {error}")).ok();
        Self { inotify, watched: HashMap::new() }
    }

    /// Watches for the next write to a file.
    pub(crate) fn add(&mut self, key: FileKey, file: &File) {
        let Some(inotify) = &self.inotify else { return };
        // Works whatever has become of the file's path.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        match inotify::add_watch(inotify, path, WatchFlags::MODIFY | WatchFlags::ONESHOT) {
            Ok(watch) => _ = self.watched.insert(watch, key),
            Err(error) => log::info!("a probed file cannot be watched for writes: {error}"),
        }
    }

    /// Stops watching some files.
    pub(crate) fn remove(&mut self, gone: &[FileKey]) {
        let Some(inotify) = &self.inotify else { return };
        self.watched.retain(|watch, key| {
            let stays = !gone.contains(key);
            // The watch may have fired, and no longer exist.
            let _ = stays || inotify::remove_watch(inotify, *watch).is_ok();
            stays
        });
    }

    /// Returns the files that were written to since the last call, or all files if the kernel has lost track.
    pub(crate) fn written(&mut self) -> Vec<FileKey> {
        // This runs before each mapping event of the host is handled. Where everything is hooked inline, no file is
        // watched, and the read is saved.
        let Some(inotify) = self.inotify.as_ref().filter(|_| !self.watched.is_empty()) else { return Vec::new() };
        let mut buffer = [MaybeUninit::uninit(); 1024];
        let mut events = Reader::new(inotify, &mut buffer);
        let mut written = Vec::new();
        while let Ok(event) = events.next() {
            if event.events().contains(ReadFlags::QUEUE_OVERFLOW) {
                written.extend(self.watched.values());
            }
            if event.events().contains(ReadFlags::MODIFY) {
                written.extend(self.watched.get(&event.wd()));
            }
        }
        written.sort_unstable();
        written.dedup();
        self.watched.retain(|_, key| written.binary_search(key).is_err());
        written
    }

    /// Readable when a file has been written to.
    pub(crate) fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.inotify.as_ref()?.as_fd())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_write_to_a_watched_file_is_told_once_whatever_its_name_is_by_then() {
        let dir = tempfile::tempdir().expect("a directory");
        let [first, second] = ["first", "second"].map(|name| dir.path().join(name));
        let files = [&first, &second].map(|path| {
            fs::write(path, "one").expect("there is space");
            File::open(path).expect("it is there")
        });
        let keys = files.each_ref().map(|file| FileKey::of(file).expect("its attributes"));
        let mut watch = Watch::new();
        keys.iter().zip(&files).for_each(|(key, file)| watch.add(*key, file));
        let renamed = dir.path().join("renamed");
        fs::rename(&first, &renamed).expect("a name");
        fs::set_permissions(&renamed, Permissions::from_mode(0o600)).expect("ours");
        assert_eq!(watch.written(), []);
        fs::write(&renamed, "another").expect("there is space");
        assert_eq!(watch.written(), [keys[0]]);
        fs::write(&renamed, "a third").expect("there is space");
        assert_eq!(watch.written(), []);
        watch.remove(&[keys[1]]);
        fs::write(&second, "another").expect("there is space");
        assert_eq!((watch.written(), watch.watched.len()), (Vec::new(), 0));
    }

    #[test]
    fn only_a_write_changes_the_content_of_an_open_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("file");
        fs::write(&path, "one").expect("there is space");
        let file = File::open(&path).expect("it is there");
        let before = Content::of(&file).expect("attributes");
        fs::hard_link(&path, dir.path().join("another name")).expect("a name");
        let linked = Content::of(&file).expect("attributes");
        assert!(before.is_unwritten(&linked));
        fs::write(&path, "three").expect("there is space");
        assert!(!before.is_unwritten(&Content::of(&file).expect("attributes")));
    }
}
