//! Opening files the way a process with another root (a container, a chroot) would.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The root directory of a process, if it differs from heapbpf's.
#[must_use]
pub fn other_root(pid: u32) -> Option<PathBuf> {
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    let (theirs, ours) = (root.metadata().ok()?, Path::new("/").metadata().ok()?);
    ((theirs.dev(), theirs.ino()) != (ours.dev(), ours.ino())).then_some(root)
}

/// Opens `path` as a process with the root directory `root` would: symbolic links cannot leave it, and a leading `/` means
/// `root`. Never blocks on a FIFO or device.
///
/// # Errors
/// As of open(2) and openat2(2).
pub fn open(root: &Path, path: &Path) -> io::Result<File> {
    let directory = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_PATH).open(root)?;
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: `open_how` is plain integers, for which zero is a valid value; openat2(2) requires unused fields to be zero.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = (libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC) as u64;
    how.resolve = libc::RESOLVE_IN_ROOT | libc::RESOLVE_NO_MAGICLINKS;
    // SAFETY: `path` is NUL-terminated, `how` is initialised and has the size that is passed; both outlive the call, as
    // does `directory`.
    let fd = unsafe {
        libc::syscall(libc::SYS_openat2, directory.as_raw_fd(), path.as_ptr(), &raw const how, size_of_val(&how))
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: `openat2` just returned this descriptor, so nothing else owns it.
    Ok(unsafe { File::from_raw_fd(fd) })
}
