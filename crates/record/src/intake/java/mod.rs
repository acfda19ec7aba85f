//! Java frames of samples: unwinds through frames of a JVM's code, and names the functions that run in them.

mod process;
mod reader;

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use heapbpf_host::clock::monotonic_ns;
use heapbpf_host::mappings::AddressSpace;
use heapbpf_java::frames::{NotLeft, Registers, Runs, leave, leave_otherwise};
use heapbpf_java::{Library, ReadError, Tables, Vm};
use heapbpf_symbols::runtime_functions::{RuntimeFunctions, raw_frame};
use heapbpf_unwind::image::ModuleFiles;
use heapbpf_unwind::mapping::ModuleId;
use heapbpf_unwind::memory::Memory;
use heapbpf_unwind::raw::{RawFrame, SpaceView};
use heapbpf_unwind::runtime::{Left, RuntimeCode, RuntimeFrame};
use process::{Code, Process, TRUE_FOR};
use reader::{Failed, JavaReader};
use sampler_ebpf::abi::ProcessKey;

/// Maximum number of processes that are remembered as having no JVM.
const MOST_PROCESSES: usize = 1 << 14;
/// Maximum number of refused JVMs that are reported.
const MOST_REFUSED: usize = 8;
/// Name of the code by which native code calls Java.
const CALL_STUB: &str = "call_stub";

const GONE: &str = "the JVM freed its code before it could be read";
const UNREADABLE: &str = "the JVM's memory could not be read";
const NO_ANSWER: &str = "reading the JVM's memory took too long";
const IMPLAUSIBLE: &str = "a JVM frame could not be decoded";
const NOWHERE: &str = "a JVM frame leads to no code";
const NO_METHOD: &str = "an interpreted JVM frame has no method";

/// What could not be shown.
#[derive(Debug, Default)]
struct Outcomes {
    stuck: BTreeMap<&'static str, u64>,
    refused: BTreeSet<String>,
}

impl Outcomes {
    /// Counts a stack that ends in a JVM's code.
    fn count(&mut self, why: &'static str) {
        *self.stuck.entry(why).or_default() += 1;
    }

    /// Notes a process whose JVM cannot be read.
    fn refuse(&mut self, pid: u32, why: &str) {
        if self.refused.len() < MOST_REFUSED {
            self.refused.insert(format!("Java frames of process {pid} are not shown: {why}"));
        }
    }

    /// Notes for the user.
    fn notes(&self) -> impl Iterator<Item = String> {
        let reasons: Vec<String> = self.stuck.iter().map(|(why, count)| format!("{why} ({count})")).collect();
        let ends = (!reasons.is_empty())
            .then(|| format!("some sampled stacks of Java programs end in the JVM's code: {}", reasons.join(", ")));
        self.refused.iter().cloned().chain(ends)
    }
}

/// The Java side of the intake.
#[derive(Default)]
pub struct Javas {
    names: Arc<RuntimeFunctions>,
    libraries: HashMap<ModuleId, Option<Library>>,
    /// Processes without a JVM, with the generation of their mappings at the time.
    without: HashMap<ProcessKey, u64>,
    processes: HashMap<ProcessKey, Process>,
    reader: JavaReader,
    outcomes: Outcomes,
}

impl Javas {
    /// Creates it without any known JVM. New methods are added to `names`.
    pub fn new(names: Arc<RuntimeFunctions>) -> Self {
        Self { names, ..Self::default() }
    }

    /// Searches the modules of a process for a JVM, if they have changed. This happens right before a stack is unwound,
    /// so the JVM is known before the first of its stacks.
    pub fn look_at(&mut self, key: ProcessKey, space: &AddressSpace, files: &mut dyn ModuleFiles) {
        let generation = space.generation;
        if self.processes.contains_key(&key) || self.without.get(&key) == Some(&generation) {
            return;
        }
        if let Some(tables) = self.tables_in(space, files) {
            log::debug!("process {} runs a JVM", key.tgid);
            self.without.remove(&key);
            self.processes.insert(key, Process::open(key, tables));
            return;
        }
        if self.without.len() >= MOST_PROCESSES {
            self.without.clear();
        }
        self.without.insert(key, generation);
    }

    fn tables_in(&mut self, space: &AddressSpace, files: &mut dyn ModuleFiles) -> Option<Tables> {
        space.current().iter().find_map(|mapping| {
            let module = mapping.module;
            let library = match self.libraries.entry(module) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(_) if !is_jvm(&files.path(module)) => return None,
                // The audit reports why it is refused.
                Entry::Vacant(new) => {
                    new.insert(files.image(module).ok().and_then(|image| Library::find(&*image).ok().flatten()))
                }
            };
            library.as_ref()?.tables_in(mapping.start, mapping.file_offset)
        })
    }

    /// Drops what is kept about processes that have ended.
    pub fn forget(&mut self, ended: &HashSet<ProcessKey>) {
        self.processes.retain(|process, _| !ended.contains(process));
        self.without.retain(|process, _| !ended.contains(process));
    }

    /// Numbers of the functions of all processes that are known.
    pub fn functions(&self) -> impl Iterator<Item = u32> {
        self.processes.values().flat_map(Process::functions)
    }

    /// Notes for the user: how many stacks end in a JVM's code, and why.
    pub fn notes(&self) -> impl Iterator<Item = String> {
        self.outcomes.notes()
    }

    fn stuck(&mut self, why: &'static str) -> Left {
        self.outcomes.count(why);
        Left::Stuck(why)
    }
}

fn why(failed: Failed) -> &'static str {
    match failed {
        Failed::NoAnswer => NO_ANSWER,
        Failed::Read(ReadError::Unreadable) => UNREADABLE,
        Failed::Read(ReadError::Malformed) => GONE,
    }
}

/// Whether a file is a JVM, by its name.
fn is_jvm(path: &str) -> bool {
    path.rsplit('/').next().is_some_and(|name| name.starts_with("libjvm.so"))
}

/// What unwinding a frame needs from its process.
struct At<'a> {
    process: &'a mut Process,
    reader: &'a mut JavaReader,
    names: &'a RuntimeFunctions,
    vm: Arc<Vm>,
    space: &'a SpaceView<'a>,
}

impl At<'_> {
    fn code(&mut self, pc: u64) -> Result<Code, Left> {
        let code = self.process.code(self.reader, self.names, &self.vm, pc);
        code.map_err(|failed| Left::Stuck(why(failed)))?.ok_or(Left::Stuck(GONE))
    }

    /// Whether the return address of a caller lies in code.
    fn leads_to_code(&self, caller: &Registers) -> bool {
        let call = caller.ip.wrapping_sub(1);
        self.space.find(call).is_some() || self.vm.heap(call).is_some()
    }

    fn leave(&mut self, at: Registers, memory: &mut dyn Memory, frames: &mut Vec<RawFrame>) -> Result<Registers, Left> {
        let code = self.code(at.ip)?;
        let mut read = |address| memory.read(address);
        let not_left = |error| match error {
            NotLeft::Stack(missing) => Left::Missing(missing),
            NotLeft::Implausible => Left::Stuck(IMPLAUSIBLE),
        };
        let (runs, mut caller) = leave(&self.vm, &code.blob, at, &mut read).map_err(not_left)?;
        if !self.leads_to_code(&caller) && runs == Runs::Stub {
            caller = leave_otherwise(&code.blob, at, &mut read).map_err(not_left)?;
        }
        if !self.leads_to_code(&caller) {
            return Err(Left::Stuck(NOWHERE));
        }
        match runs {
            Runs::Interpreted { method, bytecode } => {
                let frame = self.process.interpreted(self.reader, self.names, &self.vm, (method, bytecode));
                frames.push(frame.map_err(|failed| match failed {
                    Failed::Read(ReadError::Malformed) => Left::Stuck(NO_METHOD),
                    other => Left::Stuck(why(other)),
                })?);
            }
            Runs::Compiled { pc } if pc != at.ip => match self.code(pc) {
                Ok(original) => frames.extend_from_slice(&original.frames),
                Err(_) => frames.extend_from_slice(&code.frames),
            },
            Runs::Compiled { .. } => frames.extend_from_slice(&code.frames),
            Runs::CallStub => frames.push(self.stub(CALL_STUB)),
            Runs::Stub => frames.push(self.stub(&code.blob.name)),
        }
        Ok(caller)
    }

    fn stub(&self, name: &str) -> RawFrame {
        raw_frame(self.names.number(name, ""), 0)
    }
}

impl RuntimeCode for Javas {
    fn leave(
        &mut self,
        space: &SpaceView,
        at: RuntimeFrame,
        memory: &mut dyn Memory,
        frames: &mut Vec<RawFrame>,
    ) -> Left {
        let key = space.key;
        let Some(process) = self.processes.get_mut(&key) else { return Left::NotMine };
        let vm = match process.vm(&mut self.reader) {
            Ok(Some(vm)) => vm,
            Ok(None) => return Left::NotMine,
            Err(refused) => {
                log::info!("Java frames of process {} are not read: {refused}", key.tgid);
                self.outcomes.refuse(key.tgid, &refused.to_string());
                return Left::NotMine;
            }
        };
        if vm.heap(at.ip).is_none() {
            return Left::NotMine;
        }
        let registers = Registers { ip: at.ip, sp: at.sp, fp: at.fp };
        let mut around = At { process, reader: &mut self.reader, names: &self.names, vm, space };
        match around.leave(registers, memory, frames) {
            Ok(Registers { ip, sp, fp }) => Left::To(RuntimeFrame { ip, sp, fp }),
            Err(Left::Stuck(why)) => self.stuck(why),
            Err(left) => left,
        }
    }

    fn version(&self, process: ProcessKey) -> u64 {
        // Other processes have their code in files.
        if self.processes.contains_key(&process) { monotonic_ns() / TRUE_FOR.as_nanos() as u64 } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use heapbpf_host::mappings::Kind;
    use heapbpf_unwind::image::Image;
    use heapbpf_unwind::mapping::Mapping;
    use heapbpf_unwind::memory::Missing;

    use super::*;

    /// Returns the same file for every module.
    struct Files {
        path: &'static str,
        asked: usize,
    }

    impl ModuleFiles for Files {
        fn image(&mut self, _: ModuleId) -> Result<Arc<dyn Image>, String> {
            self.asked += 1;
            Ok(Arc::new(vec![0u8; 100]))
        }

        fn path(&self, _: ModuleId) -> Arc<str> {
            self.path.into()
        }

        fn build_id(&self, _: ModuleId) -> Option<Vec<u8>> {
            None
        }

        fn is_anonymous(&self, _: ModuleId) -> bool {
            false
        }
    }

    struct NoStack;

    impl Memory for NoStack {
        fn read(&mut self, _: u64) -> Result<u64, Missing> {
            Err(Missing::Elsewhere)
        }
    }

    fn space() -> AddressSpace {
        let mut space = AddressSpace::default();
        let mapping = Mapping { start: 0x1000, end: 0x2000, file_offset: 0, module: ModuleId(1), since_ns: 1 };
        space.insert(mapping, &|_| Kind::File);
        space
    }

    #[test]
    fn only_a_file_of_a_jvms_name_is_looked_into_and_once() {
        let (mut javas, key, space) = (Javas::new(Arc::default()), ProcessKey::default(), space());
        for (path, asked) in
            [("/usr/bin/java", 0), ("/x/libjvmx.so", 0), ("/x/libjvm.so", 1), ("/x/libjvm.so (deleted)", 1)]
        {
            javas.without.clear();
            javas.libraries.clear();
            let mut files = Files { path, asked: 0 };
            javas.look_at(key, &space, &mut files);
            javas.look_at(key, &space, &mut files);
            assert_eq!(files.asked, asked, "{path}");
        }
        assert!(javas.processes.is_empty(), "it is no JVM");
        javas.forget(&HashSet::from([key]));
        assert!(javas.without.is_empty());
    }

    #[test]
    fn code_of_a_process_without_a_jvm_is_not_ours() {
        let mut javas = Javas::new(Arc::default());
        let mappings: Vec<Mapping> = Vec::new();
        let space = SpaceView { key: ProcessKey::default(), generation: None, mappings: &mappings };
        let at = RuntimeFrame { ip: 0x1234, sp: 0x1000, fp: None };
        let mut frames = Vec::new();
        assert_eq!(javas.leave(&space, at, &mut NoStack, &mut frames), Left::NotMine);
        assert_eq!((frames.len(), javas.notes().count()), (0, 0));
    }

    #[test]
    fn what_is_not_shown_is_told_once() {
        let mut outcomes = Outcomes::default();
        assert_eq!(outcomes.notes().count(), 0);
        for pid in [7, 7].into_iter().chain(10..30) {
            outcomes.refuse(pid, "the frames of Java 8 are not known");
        }
        ["gone", "gone", "bad"].into_iter().for_each(|why| outcomes.count(why));
        let notes: Vec<String> = outcomes.notes().collect();
        assert_eq!(notes.len(), MOST_REFUSED + 1);
        assert!(notes.contains(&"Java frames of process 7 are not shown: the frames of Java 8 are not known".into()));
        let last = "some sampled stacks of Java programs end in the JVM's code: bad (1), gone (2)";
        assert_eq!(notes.last().map(String::as_str), Some(last));
    }
}
