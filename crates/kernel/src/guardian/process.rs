//! The guardian itself: a process that makes and holds the links that the daemon asks for, and releases them when the
//! daemon has exited, for whatever reason.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;

use heapbpf_host::independent::independent_of;
use heapbpf_host::messages::{Descriptors, receive, send};
use heapbpf_host::privileges::restrict_guardian;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::messages::{LinkRequest, MOST_LET_GO, MOST_WORDS, Request};
use crate::sys::{self, LinkFds, UprobeTarget};

/// Argument that makes heapbpf run as the guardian. The daemon's PID follows, then [`AS_ADMIN`] or nothing.
pub const WORD: &str = "hold-probes";
/// The kernel requires CAP_SYS_ADMIN for such links.
pub const AS_ADMIN: &str = "as-admin";
/// Capacity for links from the start, so that the guardian does not allocate while it is probed itself.
const CAPACITY: usize = 4096;
/// Number of threads that close links beside the first thread, and the size of their stacks in bytes.
const CLOSERS: usize = 2;
const CLOSERS_STACK_BYTES: usize = 256 << 10;
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
    let (links, path) = (Vec::with_capacity(CAPACITY), String::with_capacity(64));
    let mut held = Held { links, path, closers: Closers::start(task.as_admin) };
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
            Some(Request::LetGo { numbers }) => {
                held.let_go(&numbers);
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
                held.let_go(&[wanted.number]);
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
    closers: Arc<Closers>,
}

/// Threads that close links. The kernel waits a grace period for each link, and links that are closed at the same time
/// share it. The threads run until the process ends.
struct Closers {
    closing: Mutex<Closing>,
    changed: Condvar,
}

struct Closing {
    /// Those that no thread has begun to close. The last is closed first.
    links: Vec<LinkFds>,
    /// Number of links that are not closed yet.
    open: usize,
}

impl Closers {
    /// Starts the threads, as far as possible. They are restricted as the guardian.
    fn start(as_admin: bool) -> Arc<Self> {
        let closing = Mutex::new(Closing { links: Vec::with_capacity(MOST_LET_GO), open: 0 });
        let closers = Arc::new(Self { closing, changed: Condvar::new() });
        for _ in 0..CLOSERS {
            let own = Arc::clone(&closers);
            let run = move || {
                restrict_guardian(as_admin);
                own.run();
            };
            let _ = Builder::new().stack_size(CLOSERS_STACK_BYTES).spawn(run);
        }
        closers
    }

    fn lock(&self) -> MutexGuard<'_, Closing> {
        self.closing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, closing: MutexGuard<'a, Closing>) -> MutexGuard<'a, Closing> {
        self.changed.wait(closing).unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut closing = self.lock();
        loop {
            closing = self.close_waiting(closing);
            closing = self.wait(closing);
        }
    }

    /// Closes links until all are closed or being closed.
    fn close_waiting<'a>(&'a self, mut closing: MutexGuard<'a, Closing>) -> MutexGuard<'a, Closing> {
        while let Some(link) = closing.links.pop() {
            drop(closing);
            drop(link);
            closing = self.lock();
            closing.open -= 1;
            self.changed.notify_all();
        }
        closing
    }

    /// Closes links. When this returns, all are closed.
    fn close(&self, links: impl Iterator<Item = LinkFds>) {
        let mut closing = self.lock();
        closing.links.extend(links);
        closing.open = closing.links.len();
        if closing.open > 1 {
            self.changed.notify_all();
        }
        closing = self.close_waiting(closing);
        while closing.open > 0 {
            closing = self.wait(closing);
        }
    }
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

    /// Closes links. When this returns, the kernel has removed their probes, unless the daemon still holds the links.
    fn let_go(&mut self, numbers: &[u64]) {
        let Self { links, closers, .. } = self;
        closers.close(numbers.iter().filter_map(|number| {
            let at = links.iter().rposition(|(held, ..)| held == number)?;
            let (_, link, event) = links.remove(at);
            Some((link, event))
        }));
    }
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Read as _};
    use std::mem::MaybeUninit;
    use std::os::unix::net::UnixStream;

    use heapbpf_host::messages::connection;
    use rustix::cmsg_space;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use zerocopy::IntoBytes as _;

    use super::*;

    /// The descriptors of a message are cut off if there are too many for the receiver, as at its limit on open files.
    #[test]
    fn a_request_that_was_cut_off_is_refused_and_the_next_one_served() {
        const MANY: usize = 32;
        if heapbpf_testing::is_emulated("no seccomp(2)") {
            return;
        }
        let (here, there) = connection().unwrap();
        let guardian = std::thread::spawn(move || {
            let mut held = Held { links: Vec::new(), path: String::new(), closers: Closers::start(false) };
            serve(there.as_fd(), &mut vec![0; MOST_WORDS], &mut held)
        });
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MANY))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [here.as_fd(); MANY];
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        let words = Request::LetGo { numbers: [0; MOST_LET_GO] }.words();
        sendmsg(&here, &[IoSlice::new(words.as_bytes())], &mut control, SendFlags::NOSIGNAL).unwrap();
        let answered = || {
            let mut word = [u64::MAX];
            (receive(here.as_fd(), &mut word).unwrap().0, word[0])
        };
        assert_eq!(answered(), (1, u64::from(libc::EMFILE.unsigned_abs())));
        send(here.as_fd(), &words, &[]).unwrap();
        assert_eq!(answered(), (1, 0));
        send(here.as_fd(), &Request::End.words(), &[]).unwrap();
        assert!(guardian.join().unwrap(), "it has ended otherwise");
    }

    #[test]
    fn links_that_are_closed_together_are_all_closed_afterwards() {
        if heapbpf_testing::is_emulated("no seccomp(2)") {
            return;
        }
        let closers = Closers::start(false);
        for count in [0, 1, MOST_LET_GO, 2] {
            let pairs = (0..count).map(|_| UnixStream::pair().unwrap());
            let (here, there): (Vec<UnixStream>, Vec<UnixStream>) = pairs.unzip();
            closers.close(there.into_iter().map(|end| (end.into(), None)));
            for mut end in here {
                end.set_nonblocking(true).unwrap();
                assert_eq!(end.read(&mut [0]).ok(), Some(0), "one of {count} is open");
            }
        }
    }

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
