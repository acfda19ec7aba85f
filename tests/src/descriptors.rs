//! File descriptors of other processes.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;

/// What the descriptors of a process lead to; nothing if it has ended.
pub fn open_paths(pid: u32) -> Vec<PathBuf> {
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    open.filter_map(|entry| std::fs::read_link(entry.path()).ok()).collect()
}

/// Copies another process's descriptor.
pub(crate) fn take_descriptor(pid: i32, number: i32) -> io::Result<OwnedFd> {
    // SAFETY: the calls take plain integers, and the returned descriptors have no other owner.
    unsafe {
        let process = libc::syscall(libc::SYS_pidfd_open, pid, 0);
        if process < 0 {
            return Err(io::Error::last_os_error());
        }
        let process = OwnedFd::from_raw_fd(process as i32);
        let fd = libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0);
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd as i32)) }
    }
}
