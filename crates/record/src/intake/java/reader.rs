//! Reads the memory of JVMs, on a thread that can be abandoned.

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use heapbpf_host::reader_thread::{NoAnswer, ProcessMemory, ReaderThread};
use heapbpf_java::layout::Layout;
use heapbpf_java::scopes::scopes;
use heapbpf_java::{Blob, Method, ReadError, Scope, Tables, Unsupported, Vm};

/// How long the event path waits for an answer.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// A function at a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Class and method; `None` if they could not be read.
    pub name: Option<String>,
    /// Path of the source file.
    pub file: Option<String>,
    /// Line; 0 if it is not known.
    pub line: u32,
}

/// Code, and the functions that run where it was looked up, innermost first.
pub type FoundCode = (Blob, Vec<Place>);

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failed {
    /// Nothing was read in time.
    NoAnswer,
    /// It could not be read, or is malformed.
    Read(ReadError),
}

impl From<NoAnswer> for Failed {
    fn from(_: NoAnswer) -> Self {
        Self::NoAnswer
    }
}

impl From<ReadError> for Failed {
    fn from(error: ReadError) -> Self {
        Self::Read(error)
    }
}

/// The handle to the reading thread.
#[derive(Default)]
pub struct JavaReader(ReaderThread);

impl JavaReader {
    fn ask<A: Send + 'static>(
        &mut self,
        memory: &Arc<File>,
        read: impl FnOnce(&ProcessMemory) -> A + Send + 'static,
    ) -> Result<A, NoAnswer> {
        let memory = ProcessMemory(Arc::clone(memory));
        self.0.ask("java", LONGEST_WAIT, move || read(&memory))
    }

    /// Reads a JVM. Its layout is kept in `known`.
    pub fn vm(
        &mut self,
        memory: &Arc<File>,
        tables: &Tables,
        known: &mut Option<(Layout, String)>,
    ) -> Result<Vm, Unsupported> {
        let (layout, release) = match known {
            Some(known) => known.clone(),
            None => {
                let tables = tables.clone();
                let found = self.ask(memory, move |memory| Vm::layout(memory, &tables));
                known.insert(found.unwrap_or(Err(Unsupported::NoAnswer))?).clone()
            }
        };
        let vm = self.ask(memory, move |memory| Vm::with_layout(memory, layout, release));
        vm.unwrap_or(Err(Unsupported::NoAnswer))
    }

    /// Reads something of a JVM.
    pub fn read<A: Send + 'static>(
        &mut self,
        memory: &Arc<File>,
        vm: &Arc<Vm>,
        read: impl FnOnce(&ProcessMemory, &Vm) -> Result<A, ReadError> + Send + 'static,
    ) -> Result<A, Failed> {
        let vm = Arc::clone(vm);
        Ok(self.ask(memory, move |memory| read(memory, &vm))??)
    }
}

/// The code at an address; `None` if there is none.
pub fn code(memory: &ProcessMemory, vm: &Vm, pc: u64) -> Result<Option<FoundCode>, ReadError> {
    let Some(blob) = Blob::find(memory, vm, pc)? else { return Ok(None) };
    // Without a description of what is inlined, the compiled method is still known.
    let alone = || vec![Scope { method: blob.method, bytecode: None }];
    let scopes = scopes(memory, vm, &blob, pc).unwrap_or_else(|_| alone());
    let places = scopes.iter().map(|scope| place(memory, vm, scope)).collect();
    Ok(Some((blob, places)))
}

fn place(memory: &ProcessMemory, vm: &Vm, scope: &Scope) -> Place {
    let Ok(method) = Method::read(memory, vm, scope.method) else {
        return Place { name: None, file: None, line: 0 };
    };
    let line = scope.bytecode.and_then(|bytecode| method.line(bytecode)).unwrap_or(0);
    Place { name: Some(method.name), file: method.file, line }
}

#[cfg(test)]
mod tests {

    use heapbpf_elf::ElfFile;

    use super::*;

    /// The tables of this machine's JVM, as if it were mapped here, if there is one.
    fn tables() -> Option<Tables> {
        let file = File::open("/usr/lib/jvm/java-17-openjdk-amd64/lib/server/libjvm.so").ok()?;
        let library = heapbpf_java::Library::find(&file).ok()??;
        let pieces = heapbpf_elf::Pieces::of(&file);
        let code = ElfFile::parse(&pieces).ok()?.headers.segments.iter().find(|it| it.is_executable()).copied()?;
        library.tables_in(0x1000, code.offset & !0xfff)
    }

    #[test]
    fn memory_that_is_not_there_is_an_answer_and_a_read_that_does_not_end_is_given_up() {
        let Some(tables) = tables() else { return heapbpf_testing::skipped("there is no OpenJDK 17") };
        let memory = Arc::new(File::open("/proc/self/mem").expect("it is ours"));
        let mut reader = JavaReader::default();
        assert_eq!(reader.vm(&memory, &tables, &mut None), Err(Unsupported::Unreadable));
        // A thread that takes requests and does not answer them.
        let (thread, queue) = ReaderThread::that_does_not_answer();
        reader.0 = thread;
        assert_eq!(reader.vm(&memory, &tables, &mut None), Err(Unsupported::NoAnswer));
        assert!(queue.try_recv().is_ok());
        assert_eq!(reader.vm(&memory, &tables, &mut None), Err(Unsupported::Unreadable), "another one goes on");
    }
}
