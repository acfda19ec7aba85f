//! The *cleaner*: a helper process that stops other processes for the daemon, and removes inline hooks if the daemon is
//! killed.
//!
//! Each stop happens in a separate process, a child of the cleaner. If the child does not return from the process that
//! it stops, the kernel ends the child, and the process continues. So the daemon neither waits for a process's memory
//! nor needs CAP_SYS_ADMIN.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use heapbpf_host::helper::Helper;
use heapbpf_host::messages::{Descriptors, connection, receive, send};
use heapbpf_remote::{Stopper, perform, stop_through};
use rustix::fs::{MemfdFlags, memfd_create};

/// The cleaner's name in process listings.
const NAME: &str = "heapbpf-cleaner";
/// Argument that makes heapbpf run as the cleaner. The daemon's PID follows.
pub const WORD: &str = "take-out-hooks";
/// How long a stop may take, including everything that is done before and after it.
const PATIENCE: Duration = Duration::from_secs(15);

/// Messages of the daemon. `STOP` requests a stop and comes with five descriptors (the socket for the answer, the
/// request, the process, its memory, its page map). `END` says that all hooks have been removed.
const STOP: u64 = 1;
const END: u64 = 2;
/// Messages of a child. `QUESTION` asks whether this is the moment, and is answered with 0 or 1. `ANSWER` says that the
/// answer has replaced the request.
const QUESTION: u64 = 3;
const ANSWER: u64 = 4;

/// The daemon's end of the connection. Dropping it, when no hook is left, ends the cleaner.
#[derive(Debug, Default)]
pub struct Cleaner(Option<Arc<Connection>>);

#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    /// Dropped after the socket, because the process exits when the socket is closed.
    process: Helper,
}

impl Cleaner {
    /// Starts the cleaner process. If that fails, it logs a warning and the recording goes on: threads of the daemon
    /// then stop processes, and hooks that a SIGKILL leaves behind stay until the next recording.
    #[must_use]
    pub fn started() -> Self {
        let started = connection().and_then(|(socket, there)| {
            let process = Helper::start(NAME, WORD, None, [Stdio::from(there), Stdio::null()])?;
            Ok(Arc::new(Connection { socket, process }))
        });
        match started {
            Ok(connection) => {
                stop_through(Some(connection.clone()));
                Self(Some(connection))
            }
            Err(error) => {
                log::warn!("no helper process will remove inline hooks if heapbpf is killed (SIGKILL): {error}");
                Self::default()
            }
        }
    }
}

impl Drop for Cleaner {
    fn drop(&mut self) {
        stop_through(None);
        let Some(connection) = self.0.take() else { return };
        // During a panic, `END` is not sent. The cleaner then looks for hooks that the panic may have left, once we
        // have exited.
        if std::thread::panicking() {
            std::mem::forget(connection);
        } else {
            let _ = send(connection.socket.as_fd(), &[END], &[]);
        }
    }
}

impl Stopper for Connection {
    fn stop(
        &self,
        request: &[u8],
        [process, memory, pages]: [BorrowedFd<'_>; 3],
        ask: &mut dyn FnMut() -> bool,
    ) -> io::Result<Option<Vec<u8>>> {
        let (here, there) = connection()?;
        let mut body = File::from(memfd_create(c"heapbpf-stop", MemfdFlags::CLOEXEC)?);
        body.write_all(request)?;
        let with = [there.as_fd(), body.as_fd(), process, memory, pages];
        if send(self.socket.as_fd(), &[STOP], &with).is_err() {
            return Ok(None);
        }
        // From here on, the connection ends when the child ends.
        drop(there);
        let mut word = [0];
        loop {
            self.process.await_readable(here.as_fd(), PATIENCE)?;
            match receive(here.as_fd(), &mut word) {
                Ok((1, _)) if word[0] == ANSWER => break,
                // If the child has ended by now, the next message is the end of the connection.
                Ok((1, _)) if word[0] == QUESTION => drop(send(here.as_fd(), &[u64::from(ask())], &[])),
                // If the child ends with unread messages, the read fails.
                _ => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
        }
        let mut answer = vec![0; usize::try_from(body.metadata()?.len()).unwrap_or(0)];
        body.read_exact_at(&mut answer, 0)?;
        Ok(Some(answer))
    }
}

/// Runs as the cleaner until the daemon says that it has removed all hooks (true) or the connection ends (false), and
/// until no child is left.
pub fn serve(socket: BorrowedFd<'_>) -> bool {
    // SAFETY: no handler is installed; children that end leave no zombies.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    let mut word = [0];
    let is_well = loop {
        match receive(socket, &mut word) {
            Ok((1, descriptors)) if word[0] == STOP => stop_in_child(descriptors),
            // The requester notices the end of its connection.
            Err(error) if error.raw_os_error() == Some(libc::EMFILE) => {}
            Ok((1, _)) => break true,
            _ => break false,
        }
    };
    // SAFETY: the kernel gets no address to write a status to.
    while unsafe { libc::waitpid(-1, std::ptr::null_mut(), 0) } >= 0 {}
    is_well
}

/// Carries out a request in a child process. Nothing waits for the child; its end closes its connection.
fn stop_in_child(descriptors: Descriptors) {
    // SAFETY: this process has one thread, so its child may do anything that a process may.
    if unsafe { libc::fork() } == 0 {
        let _ = catch_unwind(AssertUnwindSafe(|| answer(descriptors)));
        // SAFETY: the child ends here, without running the parent's exit handlers.
        unsafe { libc::_exit(0) }
    }
}

fn answer(descriptors: Descriptors) -> io::Result<()> {
    let [Some(socket), Some(body), Some(process), Some(memory), Some(pages)] = descriptors else { return Ok(()) };
    let body = File::from(body);
    let mut request = vec![0; usize::try_from(body.metadata()?.len()).unwrap_or(0)];
    body.read_exact_at(&mut request, 0)?;
    let asked = socket.try_clone()?;
    let is_moment = move || {
        let mut word = [0];
        let sent = send(asked.as_fd(), &[QUESTION], &[]);
        sent.and_then(|()| receive(asked.as_fd(), &mut word)).is_ok_and(|(words, _)| words == 1 && word[0] == 1)
    };
    let answer = perform(&request, [process, memory, pages], is_moment);
    body.set_len(0)?;
    body.write_all_at(&answer, 0)?;
    send(socket.as_fd(), &[ANSWER], &[])
}
