//! A program in a terminal with a slow link: a pseudo-terminal that is read at a limited rate.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{ioctl_tiocsctty, setsid};
use rustix::stdio::stdin;

use crate::others::Beside;

/// Number of reads per second.
const READS: u32 = 20;

/// A program in a pseudo-terminal. Killed when dropped.
pub struct SlowTerminal {
    child: Beside,
    ours: File,
    bytes_a_second: u32,
    /// Bytes that have come over the link.
    pub shown: Vec<u8>,
}

impl SlowTerminal {
    /// Starts a program in a terminal of 80 × 24.
    ///
    /// # Errors
    /// There is no pseudo-terminal, or no such program.
    pub fn start(command: &mut Command, bytes_a_second: u32) -> std::io::Result<Self> {
        let size = libc::winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        let (mut ours, mut theirs) = (-1, -1);
        // SAFETY: both point to integers that outlive the call; the name and the settings may be null; the size is
        // valid.
        let status = unsafe {
            libc::openpty(&raw mut ours, &raw mut theirs, std::ptr::null_mut(), std::ptr::null(), &raw const size)
        };
        if status != 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: the call succeeded, so both are open and have no other owner.
        let (ours, theirs) = unsafe { (OwnedFd::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) };
        let terminal = || theirs.try_clone().map(Stdio::from);
        command.env("TERM", "xterm-256color").stdin(terminal()?).stdout(terminal()?).stderr(Stdio::null());
        // SAFETY: between fork and exec there are only two system calls.
        unsafe { command.pre_exec(|| Ok(setsid().and_then(|_| ioctl_tiocsctty(stdin()))?)) };
        let child = command.spawn()?;
        Ok(Self { child: Beside(child), ours: ours.into(), bytes_a_second, shown: Vec::new() })
    }

    /// The program's process id.
    pub fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// Presses keys.
    ///
    /// # Errors
    /// The terminal is gone.
    pub fn press(&mut self, keys: &str) -> std::io::Result<()> {
        self.ours.write_all(keys.as_bytes())
    }

    /// Reads at the limited rate for a while, or until the program ends.
    pub fn read_for(&mut self, time: Duration) {
        let mut buffer = vec![0; (self.bytes_a_second / READS) as usize];
        for _ in 0..time.as_millis() as u32 * READS / 1000 {
            std::thread::sleep(Duration::from_secs(1) / READS);
            if !self.is_readable() {
                continue;
            }
            match self.ours.read(&mut buffer) {
                Ok(bytes @ 1..) => self.shown.extend_from_slice(&buffer[..bytes]),
                // The other end is closed.
                Ok(0) | Err(_) => return,
            }
        }
    }

    fn is_readable(&self) -> bool {
        poll(&mut [PollFd::new(&self.ours, PollFlags::IN)], Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// Reads at the limited rate until the program has ended. Returns `None` if it has not ended after this time.
    pub fn end(&mut self, patience: Duration) -> Option<ExitStatus> {
        const STEP: Duration = Duration::from_millis(500);
        for _ in 0..patience.as_millis() / STEP.as_millis() {
            self.read_for(STEP);
            if let Ok(Some(status)) = self.child.0.try_wait() {
                return Some(status);
            }
        }
        None
    }
}
