//! Reads the memory of processes in a separate thread. A page may belong to a file whose server does not answer, and
//! then reading it never returns. So the thread is abandoned if it takes too long.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

use heapbpf_elf::Memory;

/// Maximum number of abandoned threads of one reader. With that many, it reads nothing more until one of them returns.
const MOST_GIVEN_UP: usize = 64;

/// A wait is split into this many parts. If the whole machine is paused, as a virtual one may be, only one runs out.
const PARTS: u32 = 8;

/// The memory of a process, read through `/proc/PID/mem`. An open descriptor stays with the address space that it was
/// opened for.
pub struct ProcessMemory(pub Arc<File>);

impl Memory for ProcessMemory {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        self.0.read_exact_at(buffer, address).is_ok()
    }
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoAnswer {
    /// It did not come in time: do not ask about this process again soon.
    Late,
    /// Nothing was asked: too many threads were abandoned, or none could be started.
    NoThread,
}

/// A read, which passes on its own result.
pub type Read = Box<dyn FnOnce() + Send>;

/// The handle to a thread that reads.
#[derive(Default)]
pub struct ReaderThread {
    /// The queue of the thread, and whether it runs. `None` if there is no thread at the moment.
    thread: Option<(Sender<Read>, Weak<()>)>,
    /// Abandoned threads, as long as they run.
    given_up: Vec<Weak<()>>,
}

impl ReaderThread {
    /// A reader whose thread does not read. What it should read can be taken from the returned queue.
    #[cfg(any(test, feature = "testing"))]
    pub fn that_does_not_answer() -> (Self, std::sync::mpsc::Receiver<Read>) {
        let (reads, queue) = channel();
        (Self { thread: Some((reads, Weak::new())), given_up: Vec::new() }, queue)
    }

    /// Lets a thread with this name call `read`, and waits for the result for at most `longest_wait`.
    ///
    /// # Errors
    /// [`NoAnswer`], if there is no answer in time.
    pub fn ask<A: Send + 'static>(
        &mut self,
        name: &str,
        longest_wait: Duration,
        read: impl FnOnce() -> A + Send + 'static,
    ) -> Result<A, NoAnswer> {
        let (reply, answer) = sync_channel(1);
        // Nobody waits for the answer if the thread was abandoned.
        let read = Box::new(move || drop(reply.send(read())));
        self.thread(name).ok_or(NoAnswer::NoThread)?.send(read).map_err(|_| NoAnswer::NoThread)?;
        let answer = (0..PARTS).find_map(|_| answer.recv_timeout(longest_wait / PARTS).ok());
        answer.ok_or_else(|| {
            // The thread ends by itself once its read returns.
            self.given_up.extend(self.thread.take().map(|(_, runs)| runs));
            NoAnswer::Late
        })
    }

    fn thread(&mut self, name: &str) -> Option<&Sender<Read>> {
        self.given_up.retain(|runs| runs.strong_count() > 0);
        if self.thread.is_none() && self.given_up.len() < MOST_GIVEN_UP {
            let ((reads, queue), runs) = (channel::<Read>(), Arc::new(()));
            let is_running = Arc::downgrade(&runs);
            let work = move || {
                queue.into_iter().for_each(|read| read());
                drop(runs);
            };
            // If it cannot be started, the next request tries again.
            std::thread::Builder::new().name(name.into()).spawn(work).ok()?;
            self.thread = Some((reads, is_running));
        }
        self.thread.as_ref().map(|(reads, _)| reads)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::Receiver;

    use super::*;

    /// Asks a reader whose read ends when something arrives on `until`.
    fn ask(reader: &mut ReaderThread, until: Receiver<()>, limit: Duration) -> Result<bool, NoAnswer> {
        reader.ask("test", limit, move || until.recv().is_ok())
    }

    #[test]
    fn threads_that_do_not_come_back_are_few_and_count_no_more_once_they_do() {
        let mut reader = ReaderThread::default();
        let mut ends = Vec::new();
        let ended = || {
            let (end, until) = channel();
            end.send(()).expect("it is there");
            until
        };
        for given_up in 1..=MOST_GIVEN_UP {
            let (end, until) = channel();
            ends.push(end);
            assert_eq!(ask(&mut reader, until, Duration::from_millis(1)), Err(NoAnswer::Late));
            // Eight processes that cannot be read do not keep others from being read.
            if given_up == 8 {
                assert_eq!(ask(&mut reader, ended(), Duration::from_secs(60)), Ok(true));
            }
        }
        assert_eq!(ask(&mut reader, ended(), Duration::from_secs(60)), Err(NoAnswer::NoThread));
        drop(ends);
        while reader.given_up.iter().any(|runs| runs.strong_count() > 0) {
            std::thread::yield_now();
        }
        assert_eq!(ask(&mut reader, ended(), Duration::from_secs(60)), Ok(true));
    }
}
