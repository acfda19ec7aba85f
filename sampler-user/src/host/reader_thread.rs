//! Reads memory of processes. A page may belong to a file whose server does not answer, and then a read of it does not end. So
//! a thread reads, and is given up if it takes too long.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::time::Duration;

/// Most threads that are given up by one reader. After that, it reads no more.
pub const MOST_GIVEN_UP: usize = 8;

/// The memory of a process, by `/proc/PID/mem`. An open descriptor stays with the address space that it was opened for.
pub struct ProcessMemory(pub Arc<File>);

impl ProcessMemory {
    /// Fills `buffer` from an address; `false` if not all of it can be read.
    pub fn fill(&self, address: u64, buffer: &mut [u8]) -> bool {
        self.0.read_exact_at(buffer, address).is_ok()
    }
}

/// Nothing was read in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoAnswer;

/// A request, and where its answer goes.
pub type Asked<Q, A> = (Q, SyncSender<A>);

/// The handle to a thread that reads.
pub struct ReaderThread<Q, A> {
    /// Its requests; `None` if there is no thread at the moment.
    pub(crate) thread: Option<Sender<Asked<Q, A>>>,
    pub(crate) given_up: usize,
}

impl<Q, A> Default for ReaderThread<Q, A> {
    fn default() -> Self {
        Self { thread: None, given_up: 0 }
    }
}

impl<Q: Send + 'static, A: Send + 'static> ReaderThread<Q, A> {
    /// Has a thread of this name answer a request by `read`, and waits so long for the answer.
    ///
    /// # Errors
    /// [`NoAnswer`] in time: nothing should be asked of this process again.
    pub fn ask(&mut self, request: Q, name: &str, read: fn(Q) -> A, longest_wait: Duration) -> Result<A, NoAnswer> {
        let (reply, answer) = sync_channel(1);
        let thread = self.thread(name, read).ok_or(NoAnswer)?;
        thread.send((request, reply)).map_err(|_| NoAnswer)?;
        answer.recv_timeout(longest_wait).map_err(|_| {
            // It ends by itself once its read does.
            self.thread = None;
            self.given_up += 1;
            NoAnswer
        })
    }

    fn thread(&mut self, name: &str, read: fn(Q) -> A) -> Option<&Sender<Asked<Q, A>>> {
        if self.thread.is_none() && self.given_up < MOST_GIVEN_UP {
            let (requests, queue) = channel();
            std::thread::Builder::new().name(name.into()).spawn(move || serve(&queue, read)).ok()?;
            self.thread = Some(requests);
        }
        self.thread.as_ref()
    }
}

fn serve<Q, A>(queue: &Receiver<Asked<Q, A>>, read: fn(Q) -> A) {
    while let Ok((request, reply)) = queue.recv() {
        // Nobody waits for the answer if the thread was given up.
        let _ = reply.send(read(request));
    }
}
