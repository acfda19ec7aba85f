//! Helper processes: this program, started again for work that must outlive it or that the kernel may have to kill.
//!
//! Anyone who may signal us can also stop a helper, and a busy machine can starve it. So every wait for a helper has a
//! limit.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

/// How the command lines of all helpers begin.
const NAMES: &[u8] = b"heapbpf-";
/// How long a helper may take to exit once it was told to.
pub const LAST_WAIT: Duration = Duration::from_secs(5);
/// How often a helper that we wait for gets SIGCONT, in case somebody has stopped it.
const STEP: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Whether a process is a helper of any heapbpf, or a child of one.
pub fn is_helper(pid: u32) -> bool {
    std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.starts_with(NAMES))
}

/// A helper process. Dropping it waits until the process exits, which its user must have requested.
#[derive(Debug)]
pub struct Helper {
    name: &'static str,
    process: Child,
}

impl Helper {
    /// Starts this program under another name. Its arguments are `word`, our PID and `more`.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn start(name: &'static str, word: &str, more: Option<&str>, [input, output]: [Stdio; 2]) -> io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.arg0(name).arg(word).arg(std::process::id().to_string()).args(more);
        // It needs no variables, and some would make it load libraries.
        command.env_clear().stdin(input).stdout(output).stderr(Stdio::null());
        Ok(Self { name, process: command.spawn()? })
    }

    /// Takes the pipes to it and from it. They can be taken once.
    pub fn take_pipes(&mut self) -> (Option<ChildStdin>, Option<ChildStdout>) {
        (self.process.stdin.take(), self.process.stdout.take())
    }

    /// Waits until something can be read from the helper, or the helper closes its end.
    ///
    /// # Errors
    /// [`io::ErrorKind::TimedOut`] after the limit, or the kernel's error.
    pub fn await_readable(&self, from: BorrowedFd<'_>, limit: Duration) -> io::Result<()> {
        let begun = Instant::now();
        while retry_on_intr(|| poll(&mut [PollFd::new(&from, PollFlags::IN)], Some(&STEP)))? == 0 {
            if begun.elapsed() > limit {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.go_on();
        }
        Ok(())
    }

    /// Continues the helper and its children if they are stopped.
    fn go_on(&self) {
        let group = i32::try_from(self.process.id()).ok().and_then(Pid::from_raw);
        // It leads its own process group once it has begun.
        let _ = group.map(|group| kill_process_group(group, Signal::CONT));
    }

    fn has_ended(&self) -> io::Result<()> {
        let pid = i32::try_from(self.process.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
        self.go_on();
        self.await_readable(pidfd_open(pid, PidfdFlags::empty())?.as_fd(), LAST_WAIT)
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        drop(self.take_pipes());
        match self.has_ended() {
            Ok(()) => drop(self.process.wait()),
            Err(error) => {
                let (name, pid) = (self.name, self.process.id());
                log::warn!("{name} (process {pid}) does not end ({error}); it was left running");
            }
        }
    }
}
