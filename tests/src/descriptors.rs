//! File descriptors of other processes.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// What the descriptors of a process lead to; nothing if it has ended.
pub fn open_paths(pid: u32) -> Vec<PathBuf> {
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    open.filter_map(|entry| std::fs::read_link(entry.path()).ok()).collect()
}

/// Copies another process's descriptor.
pub(crate) fn take_descriptor(pid: i32, number: i32) -> io::Result<OwnedFd> {
    let process = pidfd_open(Pid::from_raw(pid).ok_or(io::ErrorKind::NotFound)?, PidfdFlags::empty())?;
    Ok(pidfd_getfd(process, number, PidfdGetfdFlags::empty())?)
}
