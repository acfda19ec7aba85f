//! Facts about JVMs, read from the memory of processes.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use heapbpf_host::reader_thread::{ProcessMemory, ReaderThread};
use heapbpf_java::{Tables, Unsupported, Vm};

/// Maximum time to wait for a process.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// Returns the version of a process's JVM, if its frames are supported.
///
/// # Errors
/// Why they are not supported.
pub fn release(pid: u32, tables: Tables) -> Result<String, Unsupported> {
    let memory = File::open(format!("/proc/{pid}/mem")).map_err(|_| Unsupported::Unreadable)?;
    let memory = ProcessMemory(Arc::new(memory));
    let read = move || Vm::layout(&memory, &tables).map(|(_, release)| release);
    ReaderThread::default().ask("java", LONGEST_WAIT, read).unwrap_or(Err(Unsupported::NoAnswer))
}
