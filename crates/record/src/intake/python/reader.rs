//! Reads code objects from the memory of processes, on a thread that can be abandoned.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use heapbpf_host::reader_thread::{NoAnswer, ProcessMemory, ReaderThread};
use heapbpf_python::code::CodeError;
use heapbpf_python::{Code, Layout, Memory};

/// How long the event path waits for an answer.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// Code objects are read from records as well, so reading memory is a trait of its own.
struct Process(ProcessMemory);

impl Memory for Process {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        heapbpf_elf::Memory::read(&self.0, address, buffer)
    }
}

struct Request {
    memory: Arc<File>,
    layout: Layout,
    /// Addresses and checks of code objects.
    wanted: Vec<(u64, u64)>,
}

type Codes = Vec<Result<Code, CodeError>>;

/// The handle to the reading thread.
#[derive(Default)]
pub struct CodeReader(ReaderThread<Request, Codes>);

impl CodeReader {
    /// Reads code objects of one process.
    ///
    /// # Errors
    /// [`NoAnswer`] in time: this process should not be read again.
    pub fn read(&mut self, memory: &Arc<File>, layout: &Layout, wanted: Vec<(u64, u64)>) -> Result<Codes, NoAnswer> {
        let request = Request { memory: Arc::clone(memory), layout: *layout, wanted };
        self.0.ask(request, "python", read, LONGEST_WAIT)
    }
}

fn read(Request { memory, layout, wanted }: Request) -> Codes {
    let memory = Process(ProcessMemory(memory));
    wanted.iter().map(|(address, check)| Code::read(&memory, &layout, *address, *check)).collect()
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
}
