//! Keeps the daemon's memory, which has copies of stacks, out of core dumps and away from other processes of its user.

use std::io;
use std::sync::atomic::{AtomicI64, Ordering};

use rustix::process::{DumpableBehavior, set_dumpable_behavior};

/// What of a process's memory is dumped. A command inherits it, and keeps it through its exec.
const FILTER: &str = "/proc/self/coredump_filter";

/// The filter as it was; negative if it is unknown.
static BEFORE: AtomicI64 = AtomicI64::new(-1);

/// Leaves this process's memory out of core dumps, those that the kernel writes and those that gcore writes, and forbids
/// other processes of this user to read it.
pub fn hide_memory() {
    let hidden = leave_out().and_then(|()| Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?));
    if let Err(error) = hidden {
        log::info!("memory cannot be kept out of core dumps: {error}");
    }
}

fn leave_out() -> io::Result<()> {
    let before = std::fs::read_to_string(FILTER)?;
    let before = i64::from_str_radix(before.trim(), 16).map_err(io::Error::other)?;
    // Opened anew: reading moved the position.
    std::fs::write(FILTER, "0")?;
    BEFORE.store(before, Ordering::Relaxed);
    Ok(())
}

/// Takes back for a command, between its fork and its exec, what it would inherit. Allocates nothing and takes no lock. (That
/// the memory must not be dumped at all ends with the exec.)
pub fn show_memory_of_command() {
    let before = BEFORE.load(Ordering::Relaxed);
    let Ok(before) = u32::try_from(before) else { return };
    let mut text = *b"0x00000000";
    for (at, digit) in text[2..].iter_mut().rev().enumerate() {
        *digit = b"0123456789abcdef"[(before >> (4 * at) & 0xf) as usize];
    }
    // SAFETY: three system calls that are allowed between fork and exec, with a NUL-terminated path and a live buffer of the
    // length that is passed.
    unsafe {
        let file = libc::open(c"/proc/self/coredump_filter".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if file >= 0 {
            libc::write(file, text.as_ptr().cast(), text.len());
            libc::close(file);
        }
    }
}
