//! Reads code objects from the memory of processes. A page may belong to a file whose server does not answer, and then a
//! read of it does not end. So a thread reads, and is given up if it takes too long.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::time::Duration;

use heapbpf_python::code::CodeError;
use heapbpf_python::{Code, Layout, Memory};

/// How long the event path waits for an answer.
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// Most threads that are given up. After that, no memory is read any more.
const MOST_GIVEN_UP: usize = 8;

/// The memory of a process, by `/proc/PID/mem`. An open descriptor stays with the address space that it was opened for.
struct ProcessMemory(Arc<File>);

impl Memory for ProcessMemory {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        self.0.read_exact_at(buffer, address).is_ok()
    }
}

struct Request {
    memory: Arc<File>,
    layout: Layout,
    /// Addresses and checks of code objects.
    wanted: Vec<(u64, u64)>,
    reply: SyncSender<Vec<Result<Code, CodeError>>>,
}

/// Why nothing was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoAnswer;

/// The handle to the thread that reads.
#[derive(Default)]
pub struct CodeReader {
    thread: Option<Sender<Request>>,
    given_up: usize,
}

impl CodeReader {
    /// Reads code objects of one process.
    ///
    /// # Errors
    /// [`NoAnswer`] in time: nothing should be asked of this process again.
    pub fn read(
        &mut self,
        memory: &Arc<File>,
        layout: &Layout,
        wanted: Vec<(u64, u64)>,
    ) -> Result<Vec<Result<Code, CodeError>>, NoAnswer> {
        let (reply, answer) = sync_channel(1);
        let request = Request { memory: Arc::clone(memory), layout: *layout, wanted, reply };
        let thread = self.thread().ok_or(NoAnswer)?;
        thread.send(request).map_err(|_| NoAnswer)?;
        answer.recv_timeout(LONGEST_WAIT).map_err(|_| {
            // It ends by itself once its read does.
            self.thread = None;
            self.given_up += 1;
            NoAnswer
        })
    }

    fn thread(&mut self) -> Option<&Sender<Request>> {
        if self.thread.is_none() && self.given_up < MOST_GIVEN_UP {
            let (requests, queue) = channel();
            std::thread::Builder::new().name("python".into()).spawn(move || serve(&queue)).ok()?;
            self.thread = Some(requests);
        }
        self.thread.as_ref()
    }
}

fn serve(queue: &Receiver<Request>) {
    while let Ok(Request { memory, layout, wanted, reply }) = queue.recv() {
        let memory = ProcessMemory(memory);
        let read = |(address, check): &(u64, u64)| Code::read(&memory, &layout, *address, *check);
        // Nobody waits for the answer if the thread was given up.
        let _ = reply.send(wanted.iter().map(read).collect());
    }
}

#[cfg(test)]
mod tests {
    use heapbpf_python::Version;

    use super::*;

    fn layout() -> Layout {
        Layout::of_version(Version::three(12)).expect("known")
    }

    #[test]
    fn memory_that_is_not_there_is_an_answer() {
        let memory = Arc::new(File::open("/proc/self/mem").expect("it is ours"));
        let answer = CodeReader::default().read(&memory, &layout(), vec![(8, 0), (16, 0)]);
        assert_eq!(answer, Ok(vec![Err(CodeError::Unreadable), Err(CodeError::Unreadable)]));
    }

    #[test]
    fn a_read_that_does_not_end_is_given_up_and_others_go_on() {
        let mut reader = CodeReader { thread: Some(channel().0), given_up: 0 };
        let memory = Arc::new(File::open("/proc/self/mem").expect("it is ours"));
        // A thread that takes requests and does not answer them.
        let (requests, queue) = channel();
        reader.thread = Some(requests);
        assert_eq!(reader.read(&memory, &layout(), vec![(8, 0)]), Err(NoAnswer));
        assert!(queue.try_recv().is_ok());
        assert_eq!(reader.read(&memory, &layout(), vec![(8, 0)]), Ok(vec![Err(CodeError::Unreadable)]));
        reader.thread = None;
        reader.given_up = MOST_GIVEN_UP;
        assert_eq!(reader.read(&memory, &layout(), vec![(8, 0)]), Err(NoAnswer));
    }
}
