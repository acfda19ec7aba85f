//! Reads code objects from the memory of processes, on a thread that can be abandoned.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use heapbpf_host::reader_thread::{NoAnswer, ProcessMemory, ReaderThread};
use heapbpf_python::code::CodeError;
use heapbpf_python::{Code, Layout, Memory};

/// How long the event path waits for an answer.
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// Maximum number of bytes that the code objects of one answer take. The further ones come without their line tables.
const MOST_BYTES: usize = 32 << 20;

/// Code objects are read from records as well, so reading memory is a trait of its own.
struct Process(ProcessMemory);

impl Memory for Process {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        heapbpf_elf::Memory::read(&self.0, address, buffer)
    }
}

type Codes = Vec<Result<Code, CodeError>>;

/// Reads code objects of one process. `wanted` has their addresses and checks.
///
/// # Errors
/// [`NoAnswer`] in time: this process should not be read again.
pub fn read(
    reader: &mut ReaderThread,
    memory: &Arc<File>,
    layout: &Layout,
    wanted: Vec<(u64, u64)>,
) -> Result<Codes, NoAnswer> {
    let (memory, layout) = (Process(ProcessMemory(Arc::clone(memory))), *layout);
    reader.ask("python", LONGEST_WAIT, move || read_codes(&memory, &layout, &wanted))
}

fn read_codes(memory: &Process, layout: &Layout, wanted: &[(u64, u64)]) -> Codes {
    let mut left_bytes = MOST_BYTES;
    let read = |(address, check): &(u64, u64)| -> Result<Code, CodeError> {
        let mut code = Code::read(memory, layout, *address, *check)?;
        left_bytes = left_bytes.checked_sub(code.held_bytes()).unwrap_or_else(|| {
            code.forget_lines();
            0
        });
        Ok(code)
    };
    wanted.iter().map(read).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::unix::fs::FileExt as _;

    use heapbpf_python::Version;
    use sampler_ebpf::abi::check;

    use super::*;

    pub fn layout() -> Layout {
        Layout::of_version(Version::three(12)).expect("known")
    }

    /// A file with the contents of a process's memory: code objects with the same name and line table. Also returns
    /// their addresses and checks.
    pub fn with_codes(count: u64, line_bytes: usize) -> (Arc<File>, Vec<(u64, u64)>) {
        const NAME: u64 = 0x1000;
        const CODES: u64 = 0x10000;
        const CODE_BYTES: u64 = 0x200;
        const LINES: u64 = 0x100_0000;
        let (file, layout) = (tempfile::tempfile().expect("a file"), layout());
        let put = |address: u64, bytes: &[u8]| file.write_all_at(bytes, address).expect("our own");
        let long = |address: u64, value: u64| put(address, &value.to_le_bytes());
        // A string of one character: compact, ASCII, one byte wide.
        long(NAME + 16, 1);
        long(NAME + 32, 1 << 5 | 1 << 6 | 1 << 2);
        put(NAME + u64::from(layout.code.ascii_head), b"f");
        long(LINES + 16, line_bytes as u64);
        put(LINES + 32, &vec![0; line_bytes]);
        // The first instruction is on the line after the function's first.
        put(LINES + 32, &[0x80 | 11 << 3]);
        let addresses = (0..count).map(|number| CODES + number * CODE_BYTES);
        let code = |address: u64| {
            put(address, &[0; CODE_BYTES as usize]);
            long(address, 1);
            put(address + u64::from(layout.process.code_first_line), &7u32.to_le_bytes());
            for (place, value) in [(layout.code.file, NAME), (layout.code.name, NAME), (layout.code.lines, LINES)] {
                long(address + u64::from(place), value);
            }
            (address, check([NAME, 0, NAME, LINES], 7))
        };
        let codes = addresses.map(code).collect();
        (Arc::new(file), codes)
    }

    #[test]
    fn memory_that_is_not_there_is_an_answer() {
        let memory = Arc::new(File::open("/proc/self/mem").expect("it is ours"));
        let answer = read(&mut ReaderThread::default(), &memory, &layout(), vec![(8, 0), (16, 0)]);
        assert_eq!(answer, Ok(vec![Err(CodeError::Unreadable), Err(CodeError::Unreadable)]));
    }

    #[test]
    fn long_line_tables_beyond_the_bound_are_left_out() {
        let (memory, wanted) = with_codes(40, 1 << 20);
        let answer = read(&mut ReaderThread::default(), &memory, &layout(), wanted).expect("a file answers");
        let codes: Vec<Code> = answer.into_iter().map(|code| code.expect("it is whole")).collect();
        assert!(codes.iter().all(|code| code.name == "f"));
        let lines: Vec<Option<u32>> = codes.iter().map(|code| code.line(&layout(), 0)).collect();
        assert_eq!(lines, [vec![Some(8); 31], vec![None; 9]].concat());
        assert!(codes.iter().map(Code::held_bytes).sum::<usize>() <= MOST_BYTES);
    }
}
