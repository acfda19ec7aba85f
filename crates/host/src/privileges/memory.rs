//! Keeps the daemon's memory, which contains copies of stacks, out of core dumps and away from other processes of the
//! same user.

use std::io;
use std::sync::atomic::{AtomicI64, Ordering};

use rustix::process::{DumpableBehavior, set_dumpable_behavior};

/// Selects which memory of a process is dumped. A command inherits it, and keeps it through its exec.
const FILTER: &str = "/proc/self/coredump_filter";

/// The filter's original value; negative if it is unknown.
static BEFORE: AtomicI64 = AtomicI64::new(-1);

/// Leaves this process's memory out of core dumps, both the kernel's and gcore's, and forbids other processes of this
/// user to read it.
pub fn hide_memory() {
    let hidden = leave_out().and_then(|()| Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?));
    if let Err(error) = hidden {
        log::info!("memory cannot be kept out of core dumps: {error}");
    }
}

fn leave_out() -> io::Result<()> {
    let before = std::fs::read_to_string(FILTER)?;
    let before = i64::from_str_radix(before.trim(), 16).map_err(io::Error::other)?;
    // Opened again, because reading moved the position.
    std::fs::write(FILTER, "0")?;
    BEFORE.store(before, Ordering::Relaxed);
    Ok(())
}

/// Restores for a command, between its fork and its exec, what it would inherit. Allocates nothing and takes no lock.
/// (The exec itself makes its memory dumpable again.)
pub fn show_memory_of_command() {
    let before = BEFORE.load(Ordering::Relaxed);
    let Ok(before) = u32::try_from(before) else { return };
    let mut text = *b"0x00000000";
    for (at, digit) in text[2..].iter_mut().rev().enumerate() {
        *digit = b"0123456789abcdef"[(before >> (4 * at) & 0xf) as usize];
    }
    // SAFETY: these system calls are allowed between fork and exec. The path is NUL-terminated, and the buffer is live
    // and has the length that is passed.
    unsafe {
        let file = libc::open(c"/proc/self/coredump_filter".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if file >= 0 {
            libc::write(file, text.as_ptr().cast(), text.len());
            libc::close(file);
        }
    }
}
