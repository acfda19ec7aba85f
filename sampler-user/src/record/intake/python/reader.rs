//! Reads code objects from the memory of processes, on a thread that may be given up.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use heapbpf_python::code::CodeError;
use heapbpf_python::{Code, Layout, Memory};

use crate::host::reader_thread::{NoAnswer, ProcessMemory, ReaderThread};

/// How long the event path waits for an answer.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

impl Memory for ProcessMemory {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        self.fill(address, buffer)
    }
}

struct Request {
    memory: Arc<File>,
    layout: Layout,
    /// Addresses and checks of code objects.
    wanted: Vec<(u64, u64)>,
}

type Codes = Vec<Result<Code, CodeError>>;

/// The handle to the thread that reads.
#[derive(Default)]
pub struct CodeReader(ReaderThread<Request, Codes>);

impl CodeReader {
    /// Reads code objects of one process.
    ///
    /// # Errors
    /// [`NoAnswer`] in time: nothing should be asked of this process again.
    pub fn read(&mut self, memory: &Arc<File>, layout: &Layout, wanted: Vec<(u64, u64)>) -> Result<Codes, NoAnswer> {
        let request = Request { memory: Arc::clone(memory), layout: *layout, wanted };
        self.0.ask(request, "python", read, LONGEST_WAIT)
    }
}

fn read(Request { memory, layout, wanted }: Request) -> Codes {
    let memory = ProcessMemory(memory);
    wanted.iter().map(|(address, check)| Code::read(&memory, &layout, *address, *check)).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use heapbpf_python::Version;

    use super::*;
    use crate::host::reader_thread::MOST_GIVEN_UP;

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
        let mut reader = CodeReader::default();
        let memory = Arc::new(File::open("/proc/self/mem").expect("it is ours"));
        // A thread that takes requests and does not answer them.
        let (requests, queue) = channel();
        reader.0.thread = Some(requests);
        assert_eq!(reader.read(&memory, &layout(), vec![(8, 0)]), Err(NoAnswer));
        assert!(queue.try_recv().is_ok());
        assert_eq!(reader.read(&memory, &layout(), vec![(8, 0)]), Ok(vec![Err(CodeError::Unreadable)]));
        reader.0.thread = None;
        reader.0.given_up = MOST_GIVEN_UP;
        assert_eq!(reader.read(&memory, &layout(), vec![(8, 0)]), Err(NoAnswer));
    }
}
