//! Reads memory of processes. A page may belong to a file whose server does not answer, and then a read of it does not end. So
//! a thread reads, and is given up if it takes too long.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

use heapbpf_elf::Memory;

/// Most threads of one reader that do not come back. It reads no more until one of them does.
const MOST_GIVEN_UP: usize = 64;

/// The memory of a process, by `/proc/PID/mem`. An open descriptor stays with the address space that it was opened for.
pub struct ProcessMemory(pub Arc<File>);

impl Memory for ProcessMemory {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        self.0.read_exact_at(buffer, address).is_ok()
    }
}

/// Nothing was read in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoAnswer;

/// A request, and where its answer goes.
pub type Asked<Q, A> = (Q, SyncSender<A>);

/// A thread's requests, and whether it runs.
type Thread<Q, A> = (Sender<Asked<Q, A>>, Weak<()>);

/// The handle to a thread that reads.
pub struct ReaderThread<Q, A> {
    /// `None` if there is no thread at the moment.
    thread: Option<Thread<Q, A>>,
    /// Those that were given up, as long as they run.
    given_up: Vec<Weak<()>>,
}

impl<Q, A> Default for ReaderThread<Q, A> {
    fn default() -> Self {
        Self { thread: None, given_up: Vec::new() }
    }
}

#[cfg(any(test, feature = "testing"))]
impl<Q, A> ReaderThread<Q, A> {
    /// A reader whose thread takes requests, which come out of the queue, and answers none.
    pub fn that_does_not_answer() -> (Self, Receiver<Asked<Q, A>>) {
        let (requests, queue) = channel();
        (Self { thread: Some((requests, Weak::new())), given_up: Vec::new() }, queue)
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
            self.given_up.extend(self.thread.take().map(|(_, runs)| runs));
            NoAnswer
        })
    }

    fn thread(&mut self, name: &str, read: fn(Q) -> A) -> Option<&Sender<Asked<Q, A>>> {
        self.given_up.retain(|runs| runs.strong_count() > 0);
        if self.thread.is_none() && self.given_up.len() < MOST_GIVEN_UP {
            let ((requests, queue), runs) = (channel(), Arc::new(()));
            let is_running = Arc::downgrade(&runs);
            let work = move || {
                serve(&queue, read);
                drop(runs);
            };
            // One that cannot be started is tried again with the next request.
            std::thread::Builder::new().name(name.into()).spawn(work).ok()?;
            self.thread = Some((requests, is_running));
        }
        self.thread.as_ref().map(|(requests, _)| requests)
    }
}

fn serve<Q, A>(queue: &Receiver<Asked<Q, A>>, read: fn(Q) -> A) {
    while let Ok((request, reply)) = queue.recv() {
        // Nobody waits for the answer if the thread was given up.
        let _ = reply.send(read(request));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reader whose reads end when something comes.
    fn ask(
        reader: &mut ReaderThread<Receiver<()>, bool>,
        until: Receiver<()>,
        limit: Duration,
    ) -> Result<bool, NoAnswer> {
        reader.ask(until, "test", |until| until.recv().is_ok(), limit)
    }

    #[test]
    fn threads_that_do_not_come_back_are_few_and_count_no_more_once_they_do() {
        let mut reader = ReaderThread::default();
        let mut ends = Vec::new();
        for _ in 0..MOST_GIVEN_UP {
            let (end, until) = channel();
            ends.push(end);
            assert_eq!(ask(&mut reader, until, Duration::from_millis(1)), Err(NoAnswer));
        }
        let ended = || {
            let (end, until) = channel();
            end.send(()).expect("it is there");
            until
        };
        assert_eq!(ask(&mut reader, ended(), Duration::from_secs(60)), Err(NoAnswer), "there is no thread left");
        drop(ends);
        while reader.given_up.iter().any(|runs| runs.strong_count() > 0) {
            std::thread::yield_now();
        }
        assert_eq!(ask(&mut reader, ended(), Duration::from_secs(60)), Ok(true));
    }
}
