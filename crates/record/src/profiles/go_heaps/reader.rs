//! Reads heaps of Go programs from the memory of processes, on a thread that can be abandoned.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use heapbpf_go::{Heap, Moments, Unread};
use heapbpf_host::reader_thread::{NoAnswer, ProcessMemory, ReaderThread};
use heapbpf_symbols::go::GoProgram;
use heapbpf_unwind::mapping::Mapping;

/// How long to wait for the answer of a process.
const LONGEST_WAIT: Duration = Duration::from_secs(6);
/// Time limit for reading a heap that answers: once for all attempts to read it at one moment, and once for reading one
/// stack after the other.
const LONGEST_READ: Duration = Duration::from_secs(2);
/// Maximum number of attempts to read a heap that changes during the read, and the pause between them.
const ATTEMPTS: usize = 8;
const PAUSE: Duration = Duration::from_millis(10);

/// Reads the heap of a process, or the reason why that is not possible.
///
/// # Errors
/// [`NoAnswer`] in time: this process should not be read again.
pub fn read(
    reader: &mut ReaderThread,
    memory: &Arc<File>,
    program: &Arc<GoProgram>,
    mapping: &Mapping,
) -> Result<Result<Heap, String>, NoAnswer> {
    let (memory, program, mapping) = (ProcessMemory(Arc::clone(memory)), Arc::clone(program), *mapping);
    reader.ask("go", LONGEST_WAIT, move || read_heap(&memory, &program, &mapping))
}

fn read_heap(memory: &ProcessMemory, program: &GoProgram, mapping: &Mapping) -> Result<Heap, String> {
    let known = program.program().map_err(|why| why.to_string())?;
    let bias = known.bias(mapping.start, mapping.file_offset).ok_or("its code is not where its file has it")?;
    let mut heap = Err(Unread::Torn);
    let deadline = Instant::now() + LONGEST_READ;
    for _ in 0..ATTEMPTS {
        heap = Heap::read(known, bias, memory, Moments::One, deadline);
        if heap != Err(Unread::Torn) {
            break;
        }
        std::thread::sleep(PAUSE);
    }
    if matches!(heap, Err(Unread::Torn | Unread::Slow)) {
        heap = Heap::read(known, bias, memory, Moments::OnePerStack, Instant::now() + LONGEST_READ);
    }
    heap.map_err(|why| why.to_string())
}

#[cfg(test)]
mod tests {
    use heapbpf_unwind::mapping::ModuleId;

    use super::*;

    fn nothing() -> (Arc<File>, Arc<GoProgram>, Mapping) {
        let file = Arc::new(File::open("/proc/self/exe").expect("it is there"));
        let program = GoProgram::new(ModuleId(0), "/exe".into(), None, Arc::clone(&file));
        let mapping = Mapping { start: 0x1000, end: 0x2000, file_offset: 0, module: ModuleId(0), since_ns: 0 };
        (file, Arc::new(program), mapping)
    }

    #[test]
    fn a_program_that_is_not_gos_is_an_answer() {
        let (memory, program, mapping) = nothing();
        let answer = read(&mut ReaderThread::default(), &memory, &program, &mapping).expect("an answer");
        assert!(answer.is_err_and(|why| why.contains("table of functions")));
    }
}
