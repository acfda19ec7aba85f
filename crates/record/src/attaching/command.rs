//! `-- COMMAND`: starts it, holds it before its first instruction until the probes are attached, and waits for it.

use std::ffi::{CStr, CString, OsStr, OsString, c_int};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::JoinHandle;

use heapbpf_host::invoking_user::{InvokingUser, invoking_user};
use heapbpf_host::privileges::show_memory_of_command;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::unix::AsyncFd;

use crate::descriptors::watch;

/// Which of the descriptors 0 to 2 were closed when heapbpf was started, as bits.
static CLOSED_AT_START: AtomicU8 = AtomicU8::new(0);

/// The loader calls it before Rust's runtime opens /dev/null in place of closed descriptors.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = note_closed;

extern "C" fn note_closed() {
    for fd in 0..=2 {
        // SAFETY: the call takes integers, and changes nothing.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
            CLOSED_AT_START.fetch_or(1 << fd, Ordering::Relaxed);
        }
    }
}

/// A command that is held before its exec.
pub struct Held {
    /// Its process id; `exec` keeps it.
    pub pid: u32,
    /// The held process.
    pub process: Process,
    release: io::PipeWriter,
    spawner: JoinHandle<io::Result<Child>>,
}

/// A command could not be executed.
#[derive(Debug, thiserror::Error)]
#[error("cannot execute {program}")]
pub struct NotStarted {
    /// The command's first word.
    pub program: String,
    /// Why.
    pub source: io::Error,
}

impl NotStarted {
    /// heapbpf's exit status, as a shell's: 127 if there is no such file, otherwise 126.
    pub fn exit_status(&self) -> u8 {
        if self.source.kind() == io::ErrorKind::NotFound { 127 } else { 126 }
    }
}

/// A process by its pidfd, which always refers to this process. A process id may be reused once its process has ended.
#[derive(Debug)]
pub struct Process(OwnedFd);

/// A command that has been released.
pub struct Running {
    child: Child,
    exited: AsyncFd<OwnedFd>,
}

/// The user that a command runs as under sudo: the one who invoked sudo. Without sudo the command runs as our own user.
#[derive(Clone, Debug, PartialEq, Eq)]
struct User {
    ids: InvokingUser,
    groups: Vec<libc::gid_t>,
    /// Name and home directory, if the user database has the user.
    account: Option<(CString, CString)>,
}

/// Longest entry of the user database in bytes; most groups of a user.
const ENTRY_BYTES: usize = 16 << 10;
const MOST_GROUPS: usize = 1024;

fn user_of_command() -> Option<User> {
    let ids = invoking_user()?;
    let account = account(ids.uid);
    let groups = account.as_ref().map_or_else(|| vec![ids.gid], |(name, _)| groups(name, ids.gid));
    Some(User { ids, groups, account })
}

/// Name and home directory of a user.
fn account(uid: u32) -> Option<(CString, CString)> {
    // SAFETY: `passwd` holds integers and raw pointers only, for which all zeros is a valid value.
    let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
    let mut text = vec![0; ENTRY_BYTES];
    let mut found = std::ptr::null_mut();
    // SAFETY: all pointers are to live local variables, and the length is that of `text`.
    let status = unsafe { libc::getpwuid_r(uid, &raw mut entry, text.as_mut_ptr(), text.len(), &raw mut found) };
    if status != 0 || found.is_null() {
        return None;
    }
    // SAFETY: the call found an entry, so both fields point to C strings in `text`, which is alive until the return.
    Some(unsafe { (CStr::from_ptr(entry.pw_name).to_owned(), CStr::from_ptr(entry.pw_dir).to_owned()) })
}

/// All groups of a user.
fn groups(name: &CStr, gid: u32) -> Vec<libc::gid_t> {
    let mut groups = vec![gid; MOST_GROUPS];
    let mut count = MOST_GROUPS as libc::c_int;
    // SAFETY: `groups` has space for `count` groups; the call sets `count` to how many there are.
    let status = unsafe { libc::getgrouplist(name.as_ptr(), gid, groups.as_mut_ptr(), &raw mut count) };
    groups.truncate(if status < 0 { 1 } else { usize::try_from(count).unwrap_or(1) });
    groups
}

/// Switches to that user for good. Called between fork and exec.
fn become_user(user: &User) -> io::Result<()> {
    let InvokingUser { uid, gid } = user.ids;
    // SAFETY: system calls that are allowed between fork and exec. `user.groups` was filled before the fork and is
    // passed with its own length.
    let failed = unsafe {
        libc::setgroups(user.groups.len(), user.groups.as_ptr()) != 0
            || libc::setresgid(gid, gid, gid) != 0
            || libc::setresuid(uid, uid, uid) != 0
    };
    if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Starts a command and holds it right before its `exec`.
///
/// # Errors
/// No process can be created.
pub fn hold(command: &[OsString]) -> io::Result<Held> {
    let (program, arguments) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let (mut pid_read, pid_write) = io::pipe()?;
    let (go_read, go_write) = io::pipe()?;
    let mut command = Command::new(program);
    command.args(arguments);
    let user = user_of_command();
    if let Some((name, home)) = user.as_ref().and_then(|user| user.account.as_ref()) {
        let name = OsStr::from_bytes(name.to_bytes());
        command.envs([("USER", name), ("LOGNAME", name), ("HOME", OsStr::from_bytes(home.to_bytes()))]);
    }
    let (pid_fd, go_fd, go_write_fd) = (pid_write.as_raw_fd(), go_read.as_raw_fd(), go_write.as_raw_fd());
    let closed = CLOSED_AT_START.load(Ordering::Relaxed);
    // SAFETY: between fork and exec the closure only makes system calls that are allowed there; it takes no lock and
    // allocates nothing.
    unsafe {
        command.pre_exec(move || {
            // Only heapbpf keeps the writing end: if heapbpf dies, the read below ends and the command starts
            // unobserved.
            libc::close(go_write_fd);
            for fd in 0..=2 {
                if closed & (1 << fd) != 0 {
                    libc::close(fd);
                }
            }
            show_memory_of_command();
            if let Some(user) = &user {
                become_user(user)?;
            }
            let pid = libc::getpid().to_ne_bytes();
            if libc::write(pid_fd, pid.as_ptr().cast(), pid.len()) != pid.len() as isize {
                return Err(io::Error::last_os_error());
            }
            let mut byte = 0_u8;
            while libc::read(go_fd, (&raw mut byte).cast(), 1) < 0 {
                let error = io::Error::last_os_error();
                if error.raw_os_error() != Some(libc::EINTR) {
                    return Err(error);
                }
            }
            Ok(())
        });
    }
    // `spawn` returns after the child's exec, so it runs on a thread of its own.
    let spawner = std::thread::spawn(move || {
        let child = command.spawn();
        drop((pid_write, go_read));
        child
    });
    let mut pid = [0; 4];
    match pid_read.read_exact(&mut pid) {
        Ok(()) => {
            let pid = u32::from_ne_bytes(pid);
            // The process waits to be released and has not been reaped, so its id has not been reused.
            Ok(Held { pid, process: Process::open(pid)?, release: go_write, spawner })
        }
        Err(error) => Err(join(spawner).err().unwrap_or(error)),
    }
}

fn join(spawner: JoinHandle<io::Result<Child>>) -> io::Result<Child> {
    spawner.join().unwrap_or_else(|_| Err(io::Error::other("the thread that starts the command panicked")))
}

impl Process {
    /// Opens the process that has this id now.
    ///
    /// # Errors
    /// There is no such process.
    fn open(pid: u32) -> io::Result<Self> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self(pidfd_open(pid, PidfdFlags::empty())?))
    }

    /// Sends the process a signal, unless it has ended.
    ///
    /// # Errors
    /// There is no such signal, or the process has ended.
    pub fn signal(&self, number: c_int) -> io::Result<()> {
        let signal = Signal::from_named_raw(number).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(pidfd_send_signal(&self.0, signal)?)
    }

    /// Another handle to the same process.
    ///
    /// # Errors
    /// No descriptor is available.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }
}

impl Held {
    /// Releases the command. Must be called within a Tokio runtime.
    ///
    /// # Errors
    /// The command cannot be executed: no such file, no permission.
    pub fn release(mut self) -> io::Result<Running> {
        self.release.write_all(&[1])?;
        let child = join(self.spawner)?;
        Ok(Running { child, exited: watch(self.process.0.as_fd())? })
    }
}

impl Running {
    /// Waits until the command ends.
    ///
    /// # Errors
    /// Waiting for it fails.
    pub async fn ended(&mut self) -> io::Result<ExitStatus> {
        loop {
            let mut exited = self.exited.readable().await?;
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            exited.clear_ready();
        }
    }

    /// The command's process id, if it has not ended.
    pub fn still_runs(&mut self) -> Option<u32> {
        matches!(self.child.try_wait(), Ok(None)).then(|| self.child.id())
    }
}

/// heapbpf's exit status after a command has ended: the command's own, or 128 + the signal that killed it.
pub fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    u8::try_from(code & 0xff).unwrap_or(1)
}

/// The signal that killed a command, in a shell's words: `Segmentation fault (core dumped), signal 11`. `None` if the
/// command exited.
pub fn killed_by(status: ExitStatus) -> Option<String> {
    let number = status.signal()?;
    // SAFETY: the call returns a C string for every number. It is copied before another call may replace it.
    let words = unsafe { CStr::from_ptr(libc::strsignal(number)) }.to_string_lossy().into_owned();
    let core = if status.core_dumped() { " (core dumped)" } else { "" };
    Some(format!("{words}{core}, signal {number}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "current_thread")]
    async fn a_held_command_runs_only_when_released() {
        let dir = tempfile::tempdir().unwrap();
        let witness = dir.path().join("ran");
        let command = ["touch".into(), witness.clone().into_os_string()];
        let held = hold(&command).unwrap();
        assert!(std::path::Path::new(&format!("/proc/{}", held.pid)).exists());
        assert!(!witness.exists());
        let pid = held.pid;
        let mut running = held.release().unwrap();
        assert_eq!(running.child.id(), pid);
        assert!(running.ended().await.unwrap().success());
        assert!(witness.exists());
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_command_that_is_not_there_is_an_error_at_its_release() {
        let held = hold(&["/no/such/program".into()]).unwrap();
        assert_eq!(held.release().err().map(|error| error.kind()), Some(io::ErrorKind::NotFound));
    }

    #[tokio::test(flavor = "current_thread")]
    async fn exit_status_is_the_commands_own() {
        for (script, expected, signal) in
            [("exit 7", 7, None), ("kill -9 $$", 137, Some("Killed, signal 9")), ("true", 0, None)]
        {
            let held = hold(&["sh".into(), "-c".into(), script.into()]).unwrap();
            let status = held.release().unwrap().ended().await.unwrap();
            assert_eq!((exit_code(status), killed_by(status).as_deref()), (expected, signal), "{script}");
        }
    }

    #[tokio::test(flavor = "current_thread")]
    async fn signals_reach_the_command_and_after_its_end_nobody() {
        let held = hold(&["sleep".into(), "1000".into()]).unwrap();
        let process = held.process.try_clone().unwrap();
        let mut running = held.release().unwrap();
        process.signal(libc::SIGUSR1).unwrap();
        assert_eq!(running.ended().await.unwrap().signal(), Some(libc::SIGUSR1));
        assert_eq!(process.signal(libc::SIGKILL).unwrap_err().raw_os_error(), Some(libc::ESRCH));
    }
}
