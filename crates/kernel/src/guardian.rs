//! Links that a second process, the *guardian*, holds as well.
//!
//! The kernel cannot remove a probe on behalf of a process with a pending SIGKILL: it fails to write into the probed
//! processes, and the probe stays until these exit ("failed to unregister, leaking uprobe" in its log). That happens to
//! a daemon that is killed while it makes or removes a link. So the guardian makes and removes the links. Nothing kills
//! the guardian, least of all the daemon, and it removes what is left once the daemon has exited. The daemon holds all
//! links as well, so they stay if the guardian is gone.

mod messages;
pub mod process;

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use heapbpf_host::helper::{Helper, LAST_WAIT};
use heapbpf_host::messages::{Descriptors, connection, receive, send};
use heapbpf_host::side_by_side::while_waiting;

use self::messages::{LinkRequest, MOST_LET_GO, MOST_POINTS, Request};
use self::process::{AS_ADMIN, WORD};
use super::sys::{self, How, LinkFds, UprobeTarget};

/// The guardian's name in process listings.
pub const NAME: &str = "heapbpf-guardian";
/// How long the guardian may take to answer. The kernel takes seconds for a link while processes fork a lot.
const PATIENCE: Duration = Duration::from_secs(120);

/// Makes links. If there is a guardian process, it holds them, too.
#[derive(Clone, Debug, Default)]
pub struct Guardian(Option<Arc<Mutex<Connection>>>);

/// A link. Dropping it removes its probes.
#[derive(Debug)]
pub struct ProbeLink {
    own: Option<LinkFds>,
    held: Option<(Guardian, u64)>,
}

impl Drop for ProbeLink {
    /// The guardian's descriptors are closed last, so that the guardian removes the probes.
    fn drop(&mut self) {
        drop(self.own.take());
        if let Some((guardian, number)) = &self.held {
            guardian.let_go(only(*number));
        }
    }
}

impl ProbeLink {
    /// Removes the probes of several links side by side, because each takes the kernel tens of milliseconds, mostly
    /// waiting. The guardian releases the links first, so no process may map the probed code any more. Then no probe is
    /// left behind even if we are killed.
    pub fn close_side_by_side(mut links: Vec<Self>) {
        for link in &mut links {
            if let Some((guardian, number)) = link.held.take() {
                guardian.let_go(only(number));
            }
        }
        while_waiting(links, drop);
    }

    /// Closes several links of one recording, the last first. The guardian removes the probes of a few at a time, side
    /// by side.
    pub fn close_by_guardian(links: &mut [Self]) {
        for links in links.rchunks_mut(MOST_LET_GO) {
            let (mut numbers, mut guardian) = ([0; MOST_LET_GO], None);
            for (link, number) in links.iter_mut().zip(&mut numbers).rev() {
                // The guardian's descriptors are closed last.
                drop(link.own.take());
                if let Some(held) = link.held.take() {
                    (guardian, *number) = (Some(held.0), held.1);
                }
            }
            guardian.into_iter().for_each(|guardian| guardian.let_go(numbers));
        }
    }
}

impl Guardian {
    /// Starts the guardian process. If that fails, it logs a warning and the recording goes on: a SIGKILL may then
    /// leave probes in targets.
    #[must_use]
    pub fn started(as_admin: bool) -> Self {
        Self::start(as_admin).unwrap_or_else(|error| {
            log::warn!("no helper process will remove probes if heapbpf is killed (SIGKILL): {error}");
            Self::default()
        })
    }

    /// Starts the guardian process. It keeps CAP_SYS_ADMIN if `as_admin`.
    ///
    /// # Errors
    /// The process cannot be started.
    fn start(as_admin: bool) -> io::Result<Self> {
        let (here, there) = connection()?;
        let streams = [Stdio::from(there), Stdio::null()];
        let process = Helper::start(NAME, WORD, as_admin.then_some(AS_ADMIN), streams)?;
        let connection = Connection { socket: Some(here), process, last_number: 0 };
        Ok(Self(Some(Arc::new(Mutex::new(connection)))))
    }

    /// Links a program to instructions of a file. The guardian makes the link. If there is none, or it is unable to, we
    /// do.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn link_uprobe(&self, program: BorrowedFd<'_>, how: How, target: &UprobeTarget<'_>) -> io::Result<ProbeLink> {
        target.check()?;
        let alone = || Ok(ProbeLink { own: Some(sys::link_uprobe(program, how, target)?), held: None });
        let Some(connection) = self.0.as_ref().filter(|_| target.offsets.len() <= MOST_POINTS) else { return alone() };
        // The guardian gets the open file, because paths in /proc/self are those of the daemon.
        let path = OsStr::from_bytes(target.path.to_bytes());
        let file = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path)?;
        let made = connection.lock().unwrap_or_else(PoisonError::into_inner).link(program, &file, how, target)?;
        match made {
            Some((number, own)) => Ok(ProbeLink { own: Some(own), held: Some((self.clone(), number)) }),
            None => alone(),
        }
    }

    fn let_go(&self, numbers: [u64; MOST_LET_GO]) {
        if let Some(connection) = &self.0 {
            let _ = connection.lock().unwrap_or_else(PoisonError::into_inner).ask(&Request::LetGo { numbers }, &[]);
        }
    }
}

/// The numbers in a request to release one link.
const fn only(number: u64) -> [u64; MOST_LET_GO] {
    let mut numbers = [0; MOST_LET_GO];
    numbers[0] = number;
    numbers
}

/// The daemon's end of the connection.
#[derive(Debug)]
struct Connection {
    /// `None` once the guardian is gone.
    socket: Option<OwnedFd>,
    process: Helper,
    last_number: u64,
}

impl Connection {
    /// Has a link made. `None` if the guardian is gone, lacks a permission, or has no free descriptor.
    fn link(
        &mut self,
        program: BorrowedFd<'_>,
        file: &File,
        how: How,
        target: &UprobeTarget<'_>,
    ) -> io::Result<Option<(u64, LinkFds)>> {
        self.last_number += 1;
        let number = self.last_number;
        let request = Request::Link(LinkRequest { number, how, target: *target });
        match self.ask(&request, &[program, file.as_fd()]) {
            Some((0, [Some(link), event, ..])) => Ok(Some((number, (link, event)))),
            // If it is our side that lacks descriptors, the link was made.
            Some((libc::EMFILE, _)) => {
                self.ask(&Request::LetGo { numbers: only(number) }, &[]);
                Ok(None)
            }
            Some((libc::EPERM | libc::EACCES | libc::ENFILE | 0, _)) | None => Ok(None),
            Some((error, _)) => Err(io::Error::from_raw_os_error(error)),
        }
    }

    /// Sends a request and waits for the answer: an error number, or 0. `None` if the guardian is gone.
    fn ask(&mut self, request: &Request<'_>, descriptors: &[BorrowedFd<'_>]) -> Option<(i32, Descriptors)> {
        let socket = self.socket.as_ref()?.as_fd();
        let mut word = [0];
        let sent = send(socket, &request.words(), descriptors);
        let answered = sent.and_then(|()| self.process.await_readable(socket, PATIENCE));
        match answered.and_then(|()| receive(socket, &mut word)) {
            Ok((1, descriptors)) => Some((i32::try_from(word[0]).unwrap_or(libc::EINVAL), descriptors)),
            Ok(_) => self.lost("it was ended"),
            Err(error) if error.raw_os_error() == Some(libc::EMFILE) => Some((libc::EMFILE, Descriptors::default())),
            Err(error) => self.lost(&error.to_string()),
        }
    }

    /// Logs that the guardian is lost; the recording goes on without it. It may be making a link, so it is not killed.
    /// It releases that link when it cannot answer, and the others when the daemon has exited.
    fn lost<T>(&mut self, why: &str) -> Option<T> {
        log::warn!(
            "the helper process that holds the probes ({NAME}) is gone: {why}. The recording continues; if heapbpf \
             is killed now (SIGKILL), probes may stay in running processes"
        );
        self.socket = None;
        None
    }
}

impl Drop for Connection {
    /// All links are closed by now, because each keeps the connection alive.
    fn drop(&mut self) {
        let Some(socket) = self.socket.take() else { return };
        // The guardian closes its end once it has released everything.
        let _ = send(socket.as_fd(), &Request::End.words(), &[]);
        let _ = self.process.await_readable(socket.as_fd(), LAST_WAIT);
    }
}
