//! The guardian itself: a process that makes and holds the links that the daemon asks for, and releases them when the
//! daemon has exited, for whatever reason.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use heapbpf_host::independent::independent_of;
use heapbpf_host::messages::{Descriptors, receive, send};
use heapbpf_host::privileges::restrict_guardian;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::messages::{LinkRequest, MOST_WORDS, Request};
use crate::sys::{self, UprobeTarget};

/// Argument that makes heapbpf run as the guardian. The daemon's PID follows, then [`AS_ADMIN`] or nothing.
pub const WORD: &str = "hold-probes";
/// The kernel requires CAP_SYS_ADMIN for such links.
pub const AS_ADMIN: &str = "as-admin";
/// Capacity for links from the start, so that the guardian does not allocate while it is probed itself.
const CAPACITY: usize = 4096;
/// How long a killed daemon may take to exit. It takes milliseconds, unless a disk or a debugger holds one of its
/// threads.
const END_OF_DAEMON: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// What the guardian's arguments say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    daemon: i32,
    as_admin: bool,
}

/// Returns the task if the arguments ask for one.
pub fn asked_for(arguments: impl Iterator<Item = OsString>) -> Option<Task> {
    let mut arguments = arguments.skip(1);
    let daemon = arguments.next().filter(|word| word == WORD).and(arguments.next())?.to_str()?.parse().ok()?;
    Some(Task { daemon, as_admin: arguments.next().is_some_and(|word| word == AS_ADMIN) })
}

/// Runs as the guardian, with the connection to the daemon as standard input, until the daemon has exited.
///
/// # Errors
/// It cannot make itself independent of the daemon, or the daemon has already exited.
pub fn run(task: Task) -> io::Result<()> {
    let input = io::stdin();
    let socket = input.as_fd();
    let daemon = independent_of(task.daemon, c"hb-guardian")?;
    let mut held = Held { links: Vec::with_capacity(CAPACITY), path: String::with_capacity(64) };
    let mut words = vec![0; MOST_WORDS];
    restrict_guardian(task.as_admin);
    let has_ended_well = serve(socket, &mut words, &mut held);
    if !has_ended_well {
        // The daemon holds the links, too. If it released them last, a dying process would remove the probes.
        let _ = poll(&mut [PollFd::new(&daemon, PollFlags::IN)], Some(&END_OF_DAEMON));
    }
    drop(held);
    Ok(())
}

/// Handles requests until the daemon says that it is exiting (true) or the connection ends (false).
fn serve(socket: BorrowedFd<'_>, words: &mut [u64], held: &mut Held) -> bool {
    loop {
        let (request, descriptors) = match receive(socket, words) {
            Ok((0, _)) => return false,
            Ok((count, descriptors)) => (Request::parse(&words[..count]), descriptors),
            Err(error) if error.raw_os_error() == Some(libc::EMFILE) => {
                if answer(socket, Err(error)).is_err() {
                    return false;
                }
                continue;
            }
            Err(_) => return false,
        };
        let outcome = match request {
            Some(Request::Link(wanted)) => held.link(&wanted, &descriptors),
            Some(Request::LetGo { number }) => {
                held.let_go(number);
                Ok([None, None])
            }
            Some(Request::End) => {
                held.links.drain(..).rev().for_each(drop);
                return true;
            }
            None => Err(io::Error::from_raw_os_error(libc::EINVAL)),
        };
        if answer(socket, outcome).is_err() {
            // The daemon no longer waits for us, and makes do without the link.
            if let Some(Request::Link(wanted)) = request {
                held.let_go(wanted.number);
            }
            return false;
        }
    }
}

/// Answers with 0 and descriptors, or with the error number.
fn answer(socket: BorrowedFd<'_>, outcome: io::Result<[Option<BorrowedFd<'_>>; 2]>) -> io::Result<()> {
    match outcome {
        Ok([Some(link), Some(event)]) => send(socket, &[0], &[link, event]),
        Ok([Some(link), None]) => send(socket, &[0], &[link]),
        Ok(_) => send(socket, &[0], &[]),
        Err(error) => {
            let number = error.raw_os_error().unwrap_or(libc::EINVAL);
            send(socket, &[u64::from(number.unsigned_abs())], &[])
        }
    }
}

/// The links, in the order in which they were made.
struct Held {
    links: Vec<(u64, OwnedFd, Option<OwnedFd>)>,
    /// Buffer for the path of a file.
    path: String,
}

impl Drop for Held {
    /// Closes the links in reverse order, as the daemon does.
    fn drop(&mut self) {
        while self.links.pop().is_some() {}
    }
}

impl Held {
    fn link(&mut self, wanted: &LinkRequest<'_>, sent: &Descriptors) -> io::Result<[Option<BorrowedFd<'_>>; 2]> {
        let [Some(program), Some(file), ..] = sent else { return Err(io::Error::from_raw_os_error(libc::EBADF)) };
        self.path.clear();
        let _ = write!(self.path, "/proc/self/fd/{}\0", file.as_raw_fd());
        let path = std::ffi::CStr::from_bytes_until_nul(self.path.as_bytes()).map_err(io::Error::other)?;
        let target = UprobeTarget { path, ..wanted.target };
        let (link, event) = sys::link_uprobe(program.as_fd(), wanted.how, &target)?;
        self.links.push((wanted.number, link, event));
        let Some((_, link, event)) = self.links.last() else { return Ok([None, None]) };
        Ok([Some(link.as_fd()), event.as_ref().map(AsFd::as_fd)])
    }

    /// Closes a link. When this returns, the kernel has removed its probes, unless the daemon still holds the link.
    fn let_go(&mut self, number: u64) {
        if let Some(at) = self.links.iter().rposition(|(held, ..)| *held == number) {
            drop(self.links.remove(at));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_its_own_arguments_make_a_guardian() {
        let asked = |words: &[&str]| asked_for(words.iter().map(OsString::from));
        assert_eq!(asked(&["x", WORD, "12"]), Some(Task { daemon: 12, as_admin: false }));
        assert_eq!(asked(&["x", WORD, "12", AS_ADMIN]), Some(Task { daemon: 12, as_admin: true }));
        for none in [&["x"][..], &["x", WORD], &["x", WORD, "y"], &["x", "--pid", "12"], &[WORD, "12"]] {
            assert_eq!(asked(none), None, "{none:?}");
        }
    }
}
