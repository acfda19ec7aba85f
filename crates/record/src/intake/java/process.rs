//! What is kept about a process that runs a JVM: its layout, and the code and methods that were looked up.

use std::collections::HashMap;
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use heapbpf_java::layout::Layout;
use heapbpf_java::{Blob, Method, ReadError, Tables, Unsupported, Vm};
use heapbpf_symbols::runtime_functions::{RuntimeFunctions, UNKNOWN_FUNCTION, number_of, raw_frame};
use heapbpf_unwind::raw::RawFrame;
use sampler_ebpf::abi::ProcessKey;

use super::reader::{Failed, JavaReader, Place, code};

/// How long what was read counts as true. Afterwards it is compared again, because code and methods may be freed and
/// their memory reused.
pub const TRUE_FOR: Duration = Duration::from_secs(1);
/// Time between two attempts with a JVM that has not started yet.
const AGAIN_AFTER: Duration = Duration::from_millis(1);
/// Maximum number of bytes that are kept per process. Beyond it, everything is dropped and read again.
const MOST_BYTES: usize = 32 << 20;
/// What an entry takes besides the size that it states, bytes, roughly.
const ENTRY_BYTES: usize = 256;

/// Code at a return address.
#[derive(Clone)]
pub struct Code {
    /// The blob that it belongs to.
    pub blob: Arc<Blob>,
    /// The functions that run there, innermost first.
    pub frames: Arc<[RawFrame]>,
}

struct KnownCode {
    code: Code,
    checked: Instant,
}

struct KnownMethod {
    method: Method,
    function: u32,
    checked: Instant,
}

/// A process that runs a JVM.
pub struct Process {
    /// `None` if it cannot be read (any more).
    memory: Option<Arc<File>>,
    tables: Tables,
    /// Known before the JVM has started.
    layout: Option<(Layout, String)>,
    vm: Option<Arc<Vm>>,
    /// When the JVM was last found not ready.
    tried: Option<Instant>,
    codes: HashMap<u64, KnownCode>,
    methods: HashMap<u64, KnownMethod>,
    held_bytes: usize,
}

impl Process {
    /// Opens the memory of a process.
    pub fn open(key: ProcessKey, tables: Tables) -> Self {
        Self {
            memory: File::open(format!("/proc/{}/mem", key.tgid)).ok().map(Arc::new),
            tables,
            layout: None,
            vm: None,
            tried: None,
            codes: HashMap::new(),
            methods: HashMap::new(),
            held_bytes: 0,
        }
    }

    /// The JVM; `None` if it has not started, or was refused before.
    ///
    /// # Errors
    /// Why it is refused from now on.
    pub fn vm(&mut self, reader: &mut JavaReader) -> Result<Option<Arc<Vm>>, Unsupported> {
        if let Some(vm) = &self.vm {
            return Ok(Some(Arc::clone(vm)));
        }
        let Some(memory) = &self.memory else { return Ok(None) };
        if self.tried.is_some_and(|tried| tried.elapsed() < AGAIN_AFTER) {
            return Ok(None);
        }
        match reader.vm(memory, &self.tables, &mut self.layout) {
            Ok(vm) => Ok(Some(Arc::clone(self.vm.insert(Arc::new(vm))))),
            Err(Unsupported::NotReady) => {
                self.tried = Some(Instant::now());
                Ok(None)
            }
            Err(why) => {
                self.memory = None;
                Err(why)
            }
        }
    }

    /// Returns the error. If the reader did not answer, nothing is read from now on; what is known stays.
    fn give_up<T>(&mut self, failed: Failed) -> Result<T, Failed> {
        if failed == Failed::NoAnswer {
            self.memory = None;
        }
        Err(failed)
    }

    /// Numbers of the functions that are kept.
    pub fn functions(&self) -> impl Iterator<Item = u32> {
        let frames = self.codes.values().flat_map(|known| known.code.frames.iter()).filter_map(number_of);
        frames.chain(self.methods.values().map(|known| known.function))
    }

    fn make_space(&mut self, bytes: usize) {
        if self.held_bytes > MOST_BYTES {
            (self.codes, self.methods, self.held_bytes) = (HashMap::new(), HashMap::new(), 0);
        }
        self.held_bytes += bytes + ENTRY_BYTES;
    }

    /// The code at a return address; `None` if there is none (any more).
    ///
    /// # Errors
    /// It cannot be read.
    pub fn code(
        &mut self,
        reader: &mut JavaReader,
        names: &RuntimeFunctions,
        vm: &Arc<Vm>,
        pc: u64,
    ) -> Result<Option<Code>, Failed> {
        if let Some(known) = self.codes.get_mut(&pc) {
            let Some(memory) = self.memory.as_ref().filter(|_| known.checked.elapsed() > TRUE_FOR) else {
                return Ok(Some(known.code.clone()));
            };
            let blob = &known.code.blob;
            let start = blob.start;
            match reader.read(memory, vm, move |memory, vm| Ok(Blob::read(memory, vm, start)?.check)) {
                // The process has ended, so nothing else can be there.
                Err(Failed::Read(ReadError::Unreadable)) => return Ok(Some(known.code.clone())),
                Ok(check) if check == blob.check => {
                    known.checked = Instant::now();
                    return Ok(Some(known.code.clone()));
                }
                Err(Failed::NoAnswer) => return self.give_up(Failed::NoAnswer),
                _ => drop(self.codes.remove(&pc)),
            }
        }
        let Some(memory) = &self.memory else { return Err(Failed::NoAnswer) };
        let found = match reader.read(memory, vm, move |memory, vm| code(memory, vm, pc)) {
            Ok(found) => found,
            Err(failed) => return self.give_up(failed),
        };
        let Some((blob, places)) = found else { return Ok(None) };
        let frames = places.iter().map(|place| frame_of(names, place)).collect();
        let code = Code { blob: Arc::new(blob), frames };
        self.make_space(places.len() * size_of::<RawFrame>());
        self.codes.insert(pc, KnownCode { code: code.clone(), checked: Instant::now() });
        Ok(Some(code))
    }

    /// The frame of an interpreted method at the address of a bytecode.
    ///
    /// # Errors
    /// The method cannot be read.
    pub fn interpreted(
        &mut self,
        reader: &mut JavaReader,
        names: &RuntimeFunctions,
        vm: &Arc<Vm>,
        (address, bytecode): (u64, u64),
    ) -> Result<RawFrame, Failed> {
        let mut is_same = false;
        if let Some(known) = self.methods.get_mut(&address) {
            is_same = match self.memory.as_ref().filter(|_| known.checked.elapsed() > TRUE_FOR) {
                None => true,
                Some(memory) => match reader.read(memory, vm, move |memory, vm| Method::check(memory, vm, address)) {
                    Err(Failed::Read(ReadError::Unreadable)) => true,
                    Err(Failed::NoAnswer) => return self.give_up(Failed::NoAnswer),
                    Err(Failed::Read(ReadError::Malformed)) => false,
                    Ok(check) if check == known.method.check => {
                        known.checked = Instant::now();
                        true
                    }
                    Ok(_) => false,
                },
            };
        }
        if !is_same {
            let Some(memory) = &self.memory else { return Err(Failed::NoAnswer) };
            let method = match reader.read(memory, vm, move |memory, vm| Method::read(memory, vm, address)) {
                Ok(method) => method,
                Err(failed) => return self.give_up(failed),
            };
            let function = names.number(&method.name, method.file.as_deref().unwrap_or_default());
            self.make_space(method.held_bytes());
            self.methods.insert(address, KnownMethod { method, function, checked: Instant::now() });
        }
        let Some(KnownMethod { method, function, .. }) = self.methods.get(&address) else {
            return Err(Failed::Read(ReadError::Malformed));
        };
        let line = method.index_of(bytecode).and_then(|index| method.line(index)).unwrap_or(0);
        Ok(raw_frame(*function, line))
    }
}

fn frame_of(names: &RuntimeFunctions, place: &Place) -> RawFrame {
    let file = place.file.as_deref().unwrap_or_default();
    let function = place.name.as_ref().map_or(UNKNOWN_FUNCTION, |name| names.number(name, file));
    raw_frame(function, place.line)
}
