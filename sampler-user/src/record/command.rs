//! `-- COMMAND`: started, held before its first instruction until the probes are there, and waited for.

use std::ffi::{CStr, CString, OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::thread::JoinHandle;

/// A command that waits to be released.
pub struct Held {
    /// Its process id; `exec` keeps it.
    pub pid: u32,
    release: std::fs::File,
    spawner: JoinHandle<io::Result<Child>>,
}

/// Whom the command runs as: under sudo the invoking user, else ourselves.
#[derive(Clone, Debug, PartialEq, Eq)]
struct User {
    uid: u32,
    gid: u32,
    groups: Vec<libc::gid_t>,
    /// Name and home, where the user is known.
    account: Option<(CString, CString)>,
}

/// Longest entry of the user database; most groups of a user.
const ENTRY_BYTES: usize = 16 << 10;
const MOST_GROUPS: usize = 1024;

fn invoking_user() -> Option<User> {
    // SAFETY: no argument.
    if unsafe { libc::geteuid() } != 0 {
        return None;
    }
    let number = |name: &str| std::env::var(name).ok()?.parse().ok();
    let (uid, gid) = (number("SUDO_UID")?, number("SUDO_GID")?);
    let account = account(uid);
    let groups = account.as_ref().map_or_else(|| vec![gid], |(name, _)| groups(name, gid));
    Some(User { uid, gid, groups, account })
}

/// Name and home of a user.
fn account(uid: u32) -> Option<(CString, CString)> {
    // SAFETY: plain integers and pointers, all zeros is a value.
    let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
    let mut text = vec![0; ENTRY_BYTES];
    let mut found = std::ptr::null_mut();
    // SAFETY: the buffers are as long as told, and outlive the strings that are copied out of them below.
    let status = unsafe { libc::getpwuid_r(uid, &raw mut entry, text.as_mut_ptr(), text.len(), &raw mut found) };
    if status != 0 || found.is_null() {
        return None;
    }
    // SAFETY: the call succeeded, so both point to strings in `text`.
    Some(unsafe { (CStr::from_ptr(entry.pw_name).to_owned(), CStr::from_ptr(entry.pw_dir).to_owned()) })
}

/// All groups of a user.
fn groups(name: &CStr, gid: u32) -> Vec<libc::gid_t> {
    let mut groups = vec![gid; MOST_GROUPS];
    let mut count = MOST_GROUPS as libc::c_int;
    // SAFETY: room for `count` groups; the call sets it to how many there are.
    let status = unsafe { libc::getgrouplist(name.as_ptr(), gid, groups.as_mut_ptr(), &raw mut count) };
    groups.truncate(if status < 0 { 1 } else { usize::try_from(count).unwrap_or(1) });
    groups
}

/// Becomes that user for good. Called between fork and exec.
fn become_user(user: &User) -> io::Result<()> {
    // SAFETY: system calls that are allowed between fork and exec; the groups were found before the fork.
    let failed = unsafe {
        libc::setgroups(user.groups.len(), user.groups.as_ptr()) != 0
            || libc::setresgid(user.gid, user.gid, user.gid) != 0
            || libc::setresuid(user.uid, user.uid, user.uid) != 0
    };
    if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [0; 2];
    // SAFETY: room for two descriptors.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just made them for us.
    Ok(unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) })
}

/// Starts a command up to, but not including, its `exec`.
///
/// # Errors
/// No process can be made.
pub fn hold(command: &[OsString]) -> io::Result<Held> {
    let (program, arguments) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let (pid_read, pid_write) = pipe()?;
    let (go_read, go_write) = pipe()?;
    let mut command = Command::new(program);
    command.args(arguments);
    let user = invoking_user();
    if let Some((name, home)) = user.as_ref().and_then(|user| user.account.as_ref()) {
        let name = OsStr::from_bytes(name.to_bytes());
        command.envs([("USER", name), ("LOGNAME", name), ("HOME", OsStr::from_bytes(home.to_bytes()))]);
    }
    let (pid_fd, go_fd, go_write_fd) = (pid_write.as_raw_fd(), go_read.as_raw_fd(), go_write.as_raw_fd());
    // SAFETY: only system calls that are allowed between fork and exec; no allocation, no lock.
    unsafe {
        command.pre_exec(move || {
            // Ours alone is the reading end: if heapbpf dies, the read below ends and the command starts unobserved.
            libc::close(go_write_fd);
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
    // `spawn` returns after the child's exec, so it waits in a thread of its own.
    let spawner = std::thread::spawn(move || {
        let child = command.spawn();
        drop((pid_write, go_read));
        child
    });
    let mut pid = [0; 4];
    match std::fs::File::from(pid_read).read_exact(&mut pid) {
        Ok(()) => Ok(Held { pid: u32::from_ne_bytes(pid), release: go_write.into(), spawner }),
        Err(error) => Err(join(spawner).err().unwrap_or(error)),
    }
}

fn join(spawner: JoinHandle<io::Result<Child>>) -> io::Result<Child> {
    spawner.join().unwrap_or_else(|_| Err(io::Error::other("the thread that starts the command panicked")))
}

impl Held {
    /// Lets the command go.
    ///
    /// # Errors
    /// It cannot be executed: no such file, no permission.
    pub fn release(mut self) -> io::Result<Child> {
        self.release.write_all(&[1])?;
        join(self.spawner)
    }
}

/// heapbpf's exit status for a command's end: its own, or 128 + the signal that ended it.
pub fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    u8::try_from(code & 0xff).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_held_command_runs_only_when_released() {
        let folder = tempfile::tempdir().unwrap();
        let witness = folder.path().join("ran");
        let command = ["touch".into(), witness.clone().into_os_string()];
        let held = hold(&command).unwrap();
        assert!(std::path::Path::new(&format!("/proc/{}", held.pid)).exists());
        assert!(!witness.exists());
        let pid = held.pid;
        let mut child = held.release().unwrap();
        assert_eq!(child.id(), pid);
        assert_eq!(exit_code(child.wait().unwrap()), 0);
        assert!(witness.exists());
    }

    #[test]
    fn a_command_that_is_not_there_is_an_error_at_its_release() {
        let held = hold(&["/no/such/program".into()]).unwrap();
        assert_eq!(held.release().unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn exit_status_is_the_commands_own() {
        for (script, expected) in [("exit 7", 7), ("kill -9 $$", 137), ("true", 0)] {
            let mut child = hold(&["sh".into(), "-c".into(), script.into()]).unwrap().release().unwrap();
            assert_eq!(exit_code(child.wait().unwrap()), expected, "{script}");
        }
    }
}
