//! Directories in the spool, for batches and for the history.
//!
//! The spool may be a directory where everybody may write. So a directory in it must belong to us, and nobody else may
//! write to it. It is opened once without following a link, and everything in it is accessed through that descriptor.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Why the spool cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SpoolError {
    /// The directory cannot be used.
    #[error("cannot use the spool {dir}: {source}")]
    Io {
        /// The directory, or the file in it.
        dir: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// Another user could read or change what is kept there.
    #[error("cannot use the spool {dir}: {what}; remove it, or choose another directory for --spool")]
    NotOurs {
        /// The directory, the file in it, or the link in its place.
        dir: PathBuf,
        /// Why it is not exclusively ours.
        what: String,
    },
}

/// Lock file, held by the process that uses the directory.
const LOCK: &str = ".lock";

/// A directory in the spool that is exclusively ours, and that no other heapbpf uses.
#[derive(Debug)]
pub struct OwnDir {
    /// Its name, for messages.
    pub named: PathBuf,
    /// Keeps [`OwnDir::path`] the directory that was checked, whatever happens to its name.
    pub(super) open: File,
    /// The directory, by its descriptor.
    pub path: PathBuf,
    _lock: File,
}

impl OwnDir {
    /// Opens the directory `name` in the spool's directory, and creates both if needed.
    ///
    /// # Errors
    /// It cannot be created, others could change what is in it, or another heapbpf uses it.
    pub fn open(above: &Path, name: &str) -> Result<Self, SpoolError> {
        let named = above.join(name);
        let failed = |source| SpoolError::Io { dir: named.clone(), source };
        let open = own_dir(above, &named)?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd()));
        let lock = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(path.join(LOCK))
            .map_err(failed)?;
        lock.try_lock().map_err(|error| match error {
            fs::TryLockError::WouldBlock => failed(io::Error::other("another heapbpf uses it")),
            fs::TryLockError::Error(error) => failed(error),
        })?;
        Ok(Self { named, open, path, _lock: lock })
    }

    /// Opens a file in it for reading and appending. If there is none, creates one or returns `None`.
    ///
    /// # Errors
    /// It cannot be opened, or it is not a regular file that only we may write.
    pub fn file(&self, name: &str, create: bool) -> Result<Option<File>, SpoolError> {
        let dir = self.named.join(name);
        let mut options = OpenOptions::new();
        options.read(true).append(true).create(create).mode(0o600);
        let opened = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(self.path.join(name));
        let file = match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound && !create => return Ok(None),
            Err(error) if matches!(error.raw_os_error(), Some(libc::ELOOP | libc::EISDIR | libc::ENXIO)) => {
                return Err(SpoolError::NotOurs { dir, what: "it is not a regular file".into() });
            }
            opened => opened.map_err(|source| SpoolError::Io { dir: dir.clone(), source })?,
        };
        let metadata = file.metadata().map_err(|source| SpoolError::Io { dir: dir.clone(), source })?;
        // SAFETY: `geteuid` takes no arguments and cannot fail.
        let own = unsafe { libc::geteuid() };
        if !metadata.is_file() || metadata.uid() != own || metadata.mode() & 0o022 != 0 {
            let what = "it is not a regular file that only heapbpf may write".into();
            return Err(SpoolError::NotOurs { dir, what });
        }
        Ok(Some(file))
    }
}

/// Opens a directory of the spool, and creates it if needed. Follows no link in its place, and no other user's link in
/// the place of the directory above.
fn own_dir(above: &Path, dir: &Path) -> Result<File, SpoolError> {
    let failed = |source| SpoolError::Io { dir: dir.into(), source };
    let not_ours = |dir: &Path, what: String| Err(SpoolError::NotOurs { dir: dir.into(), what });
    // SAFETY: `geteuid` takes no arguments and cannot fail.
    let own = unsafe { libc::geteuid() };
    if let Ok(metadata) = fs::symlink_metadata(above)
        && metadata.is_symlink()
        && metadata.uid() != own
    {
        return not_ours(above, format!("it is a symbolic link of another user (uid {})", metadata.uid()));
    }
    DirBuilder::new().recursive(true).mode(0o700).create(above).map_err(failed)?;
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
        _ => {}
    }
    let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    let open = match OpenOptions::new().read(true).custom_flags(flags).open(dir) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ELOOP | libc::ENOTDIR)) => {
            return not_ours(dir, "it is not a directory".into());
        }
        opened => opened.map_err(failed)?,
    };
    let metadata = open.metadata().map_err(failed)?;
    if metadata.uid() != own {
        return not_ours(dir, format!("it belongs to another user (uid {})", metadata.uid()));
    }
    if metadata.mode() & 0o022 != 0 {
        return not_ours(dir, format!("others may write to it (mode {:03o})", metadata.mode() & 0o777));
    }
    Ok(open)
}
