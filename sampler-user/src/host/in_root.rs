//! Files as a process under another root (a container, a chroot) would open them.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The root of a process, if it is another than ours.
#[must_use]
pub fn other_root(pid: u32) -> Option<PathBuf> {
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    let (theirs, ours) = (root.metadata().ok()?, Path::new("/").metadata().ok()?);
    ((theirs.dev(), theirs.ino()) != (ours.dev(), ours.ino())).then_some(root)
}

/// Opens `path` below `root` as a process whose root that is would: no link leads out of it, and what is opened does
/// not block. A leading `/` of `path` is the root.
///
/// # Errors
/// What the operating system says.
pub fn open(root: &Path, path: &Path) -> io::Result<File> {
    let directory = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_PATH).open(root)?;
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: all-zero is the documented way to begin.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = (libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC) as u64;
    how.resolve = libc::RESOLVE_IN_ROOT | libc::RESOLVE_NO_MAGICLINKS;
    // SAFETY: the pointers are valid for the call, the size is the structure's.
    let fd = unsafe {
        libc::syscall(libc::SYS_openat2, directory.as_raw_fd(), path.as_ptr(), &raw const how, size_of_val(&how))
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let fd = i32::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: a new descriptor that nobody else has.
    Ok(unsafe { File::from_raw_fd(fd) })
}
