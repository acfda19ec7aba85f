//! Processes of heapbpf that outlive a killed daemon, to undo what it has done.

use std::ffi::CStr;
use std::io;
use std::os::fd::OwnedFd;

use rustix::process::{PidfdFlags, getppid, pidfd_open, setsid};
use rustix::thread::set_name;

/// What is sent to all processes of a name, a group or a terminal is meant for the daemon.
const IGNORED: [libc::c_int; 6] =
    [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGUSR1, libc::SIGUSR2];

/// Makes this process independent of the daemon that started it, but for its standard input. `name`: a name that `pkill heapbpf`
/// does not match. Returns a descriptor that can be read once the daemon has ended.
///
/// # Errors
/// [`io::ErrorKind::NotFound`] if the daemon has ended already, or the kernel's reason.
pub fn independent_of(daemon: i32, name: &CStr) -> io::Result<OwnedFd> {
    // The terminal's and the group's signals are not for it. Those of a terminal that it stays in are ignored.
    let _ = setsid();
    for signal in IGNORED {
        // SAFETY: no handler of ours runs; the signal is ignored.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    set_name(name)?;
    // Whoever started heapbpf may have left some open.
    // SAFETY: nothing in this process has descriptors but the three standard streams.
    unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
    std::env::set_current_dir("/")?;
    let daemon = getppid().filter(|parent| parent.as_raw_pid() == daemon).ok_or(io::ErrorKind::NotFound)?;
    Ok(pidfd_open(daemon, PidfdFlags::empty())?)
}
