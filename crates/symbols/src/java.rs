//! What JVMs say about themselves, from the memory of processes.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use heapbpf_host::reader_thread::{ProcessMemory, ReaderThread};
use heapbpf_java::{Tables, Unsupported, Vm};

/// How long a process is waited for.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// The version of a process's JVM, if its frames are understood.
///
/// # Errors
/// Why they are not.
pub fn release(pid: u32, tables: Tables) -> Result<String, Unsupported> {
    let memory = File::open(format!("/proc/{pid}/mem")).map_err(|_| Unsupported::Unreadable)?;
    let read = |(memory, tables): (ProcessMemory, Tables)| Vm::layout(&memory, &tables).map(|(_, release)| release);
    let request = (ProcessMemory(Arc::new(memory)), tables);
    ReaderThread::default().ask(request, "java", read, LONGEST_WAIT).unwrap_or(Err(Unsupported::NoAnswer))
}
