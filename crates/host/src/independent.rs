//! Helper processes that outlive a killed daemon and undo what it has done.

use std::ffi::CStr;
use std::io;
use std::os::fd::OwnedFd;

use rustix::process::{PidfdFlags, getppid, pidfd_open, setsid};
use rustix::thread::set_name;

/// Signals sent to all processes with a name, in a group or of a terminal are meant for the daemon.
const IGNORED: [libc::c_int; 6] =
    [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGUSR1, libc::SIGUSR2];

/// Makes this process independent of the daemon that started it, except for its standard input. `name` is a name that
/// `pkill heapbpf` does not match. Returns a descriptor that becomes readable once the daemon has exited.
///
/// # Errors
/// [`io::ErrorKind::NotFound`] if the daemon has already exited, or the kernel's error.
pub fn independent_of(daemon: i32, name: &CStr) -> io::Result<OwnedFd> {
    // Signals of the terminal and of the group are not meant for it. If it stays in the terminal, it ignores them.
    let _ = setsid();
    for signal in IGNORED {
        // SAFETY: no handler is installed; the signal is ignored.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    set_name(name)?;
    // Whoever started heapbpf may have left some descriptors open.
    // SAFETY: nothing in this process uses descriptors except the three standard streams.
    unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
    std::env::set_current_dir("/")?;
    let daemon = getppid().filter(|parent| parent.as_raw_pid() == daemon).ok_or(io::ErrorKind::NotFound)?;
    Ok(pidfd_open(daemon, PidfdFlags::empty())?)
}
