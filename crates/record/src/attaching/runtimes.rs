//! What targets map: modules, and among them Python interpreters, JVMs and Go programs. The BPF programs learn where
//! each interpreter keeps its frames. (The intake finds readable JVMs right before it needs them.)

use std::collections::HashMap;
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use heapbpf_attach::detours::{Detours, Leads, NotLed};
use heapbpf_audit::Missing;
use heapbpf_host::Host;
use heapbpf_host::clock::monotonic_ns;
use heapbpf_host::mappings::{Mapping, ModuleId};
use heapbpf_host::modules::ModuleSource;
use heapbpf_host::processes::GenerationId;
use heapbpf_java::Library;
use heapbpf_probes::Runtime;
use heapbpf_python::Runtime as Interpreter;
use heapbpf_symbols::go::GoProgram;

use super::probes::{Attaching, Look};

/// How long to wait for the loader to fill in a table of allocators.
const PATIENCE: Duration = Duration::from_secs(3);
/// Text of a remark: which objects are not counted.
const COPIES: &str = "only some are counted, because the compiler inlined the object allocator into some callers, and \
                      these copies cannot be bypassed";

/// The Python interpreters that targets map.
#[derive(Default)]
pub(crate) struct Interpreters {
    /// What was found in each examined module.
    pub(super) known: HashMap<ModuleId, Result<Option<Arc<Interpreter>>, heapbpf_python::Unsupported>>,
    /// Those that were found since these were last taken.
    pub(crate) new: Vec<(ModuleId, Arc<Interpreter>)>,
    /// Interpreters whose table of allocators the loader has not filled in yet, and until when to wait for it.
    pub(super) unled: Vec<(GenerationId, ModuleId, Instant)>,
}

/// A process that runs a Go program.
#[derive(Clone, Debug)]
pub struct GoProcess {
    /// The process.
    pub generation: GenerationId,
    /// The program.
    pub program: Arc<GoProgram>,
    /// Where its code is mapped.
    pub mapping: Mapping,
}

/// The Go programs that processes run.
#[derive(Default)]
pub(super) struct GoPrograms {
    pub(super) known: HashMap<ModuleId, Option<Arc<GoProgram>>>,
    pub(super) processes: HashMap<u32, GoProcess>,
}

/// Modules that a process has mapped.
pub(super) fn modules_of(host: &Host, pid: u32) -> Vec<ModuleId> {
    host.processes().current(pid).map(|generation| generation.space.modules().collect()).unwrap_or_default()
}

/// Where a process has mapped a module.
fn mapping_of(host: &Host, generation: GenerationId, module: ModuleId) -> Option<Mapping> {
    let mut mappings = host.processes().get(generation)?.space.current().iter();
    mappings.find(|mapping| mapping.module == module).copied()
}

/// CLOCK_MONOTONIC when a process mapped a module.
pub(super) fn mapped_since(host: &Host, generation: GenerationId, module: ModuleId) -> u64 {
    mapping_of(host, generation, module).map_or_else(monotonic_ns, |mapping| mapping.since_ns)
}

/// Path and contents of a module, if it is a file that can be read.
pub(super) fn file_of_module(host: &mut Host, module: ModuleId) -> Option<(Arc<str>, Arc<File>)> {
    let path = Arc::clone(&host.modules().get(module)?.path);
    match host.modules_mut().source(module) {
        Ok(ModuleSource::File(file)) => Some((path, file)),
        Ok(ModuleSource::Memory(_)) | Err(_) => None,
    }
}

impl Attaching {
    /// The language runtime in an examined module.
    pub(super) fn runtime_of(&self, module: ModuleId) -> Option<Runtime> {
        match self.modules.get(&module)? {
            Look::Runtime(runtime) => Some(*runtime),
            Look::Hook(key) | Look::Announces(key) => self.hooks.files.runtime(*key),
            Look::Nothing | Look::Refused(_) => None,
        }
    }

    /// Searches the modules of processes for language runtimes.
    pub(super) fn find_runtimes(&mut self, host: &mut Host, pids: impl Iterator<Item = u32>) {
        for pid in pids {
            let Some(generation) = host.processes().current(pid) else { continue };
            let (id, modules) = (generation.id, generation.space.modules().collect::<Vec<_>>());
            modules.into_iter().for_each(|module| self.note_runtime(host, id, module));
        }
    }

    /// Notes the language runtime in a module of a process, if there is one.
    pub(super) fn note_runtime(&mut self, host: &mut Host, generation: GenerationId, module: ModuleId) {
        self.note_interpreter(host, generation, module, None);
        self.note_jvm(host, module);
        self.note_go(host, generation, module);
    }

    /// If a module is an interpreter, tells the BPF programs where it keeps the frames of a process. `until`: how long
    /// to wait for its table of allocators, if it is checked again.
    fn note_interpreter(
        &mut self,
        host: &mut Host,
        generation: GenerationId,
        module: ModuleId,
        until: Option<Instant>,
    ) {
        let Some(runtime) = self.interpreter(host, module) else { return };
        let process = host.processes().get(generation);
        let address = process.and_then(|process| {
            let mut mappings = process.space.current().iter().filter(|mapping| mapping.module == module);
            mappings.find_map(|mapping| runtime.address_in(mapping.start, mapping.file_offset))
        });
        let Some(address) = address else { return };
        self.lead_around((generation, module), address.wrapping_sub(runtime.address), until);
        let python = runtime.layout.of_process(address);
        match self.control.set_python(generation.pid, &python) {
            Ok(()) => log::debug!("process {} runs Python {} at {address:#x}", generation.pid, runtime.version),
            Err(error) => log::info!("Python frames of process {} are not read: {error}", generation.pid),
        }
    }

    /// Makes an interpreter call its object allocator itself, if that is counted: it may run copies of the allocator
    /// instead. `bias`: address in the process minus address in the file.
    fn lead_around(&mut self, (generation, module): (GenerationId, ModuleId), bias: u64, until: Option<Instant>) {
        let Some(key) = self.modules.get(&module).and_then(Look::file) else { return };
        let Some(table) = self.hooks.files.objects(key) else { return };
        let pid = generation.pid;
        let why = match Detours::look(pid, table, bias) {
            Ok(Leads::There | Leads::ToWrappers) if table.has_copies => self
                .detours
                .lead(pid, table, bias)
                .err()
                .map(|why| (format!("{COPIES}: {why}"), matches!(why, NotLed::Stop(_)))),
            Ok(leads) => leads.why_not().map(|why| (why.to_owned(), leads == Leads::Nowhere)),
            Err(error) => Some((format!("its memory cannot be read: {error}"), false)),
        };
        let Some((why, may_pass)) = why else { return };
        let until = until.unwrap_or_else(|| Instant::now() + PATIENCE);
        if may_pass && Instant::now() < until {
            self.interpreters.unled.push((generation, module, until));
        } else {
            self.refuse(format!("process {pid}: Python's objects: {why}"));
        }
    }

    /// Checks interpreters again whose tables of allocators were not ready.
    pub(super) fn lead_late_ones(&mut self, host: &mut Host) {
        for (generation, module, until) in std::mem::take(&mut self.interpreters.unled) {
            self.note_interpreter(host, generation, module, Some(until));
        }
    }

    fn interpreter(&mut self, host: &mut Host, module: ModuleId) -> Option<Arc<Interpreter>> {
        if let Some(known) = self.interpreters.known.get(&module) {
            return known.as_ref().ok().cloned().flatten();
        }
        let mut known = Ok(None);
        if self.runtime_of(module) == Some(Runtime::Python) {
            let (path, file) = file_of_module(host, module)?;
            known = Interpreter::find(&*file, &path).map(|found| found.map(Arc::new));
            if let Err(why) = &known {
                log::info!("{path}: {why}");
            }
        }
        let found = known.as_ref().ok().cloned().flatten();
        self.interpreters.known.insert(module, known);
        self.interpreters.new.extend(found.iter().map(|runtime| (module, Arc::clone(runtime))));
        found
    }

    /// Why Python frames of a module are not shown, if they are not.
    pub(super) fn missing_python(&self, module: ModuleId) -> Option<Missing> {
        self.interpreters.known.get(&module)?.as_ref().err().map(Missing::python_frames)
    }

    /// If a module is a JVM that does not describe itself, notes the reason.
    fn note_jvm(&mut self, host: &mut Host, module: ModuleId) {
        if self.runtime_of(module) != Some(Runtime::Java) || self.jvms.contains_key(&module) {
            return;
        }
        let why = file_of_module(host, module)
            .and_then(|(path, file)| Library::find(&*file).err().inspect(|why| log::info!("{path}: {why}")));
        self.jvms.insert(module, why);
    }

    /// Why Java frames of a module are not shown, if they are not.
    pub(super) fn missing_java(&self, module: ModuleId) -> Option<Missing> {
        self.jvms.get(&module)?.as_ref().map(Missing::java_frames)
    }

    /// If a module is a Go program, notes that a process runs it.
    fn note_go(&mut self, host: &mut Host, generation: GenerationId, module: ModuleId) {
        if self.runtime_of(module) != Some(Runtime::Go) {
            return;
        }
        let Some(program) = self.go_program(host, module) else { return };
        let Some(mapping) = mapping_of(host, generation, module) else { return };
        log::debug!("process {} runs the Go program {}", generation.pid, program.path);
        // The program is mapped first; its plugins have no heap of their own.
        let process = self.go.processes.entry(generation.pid);
        let process = process.or_insert_with(|| GoProcess { generation, program: Arc::clone(&program), mapping });
        if process.generation != generation {
            *process = GoProcess { generation, program, mapping };
        }
    }

    fn go_program(&mut self, host: &mut Host, module: ModuleId) -> Option<Arc<GoProgram>> {
        if let Some(known) = self.go.known.get(&module) {
            return known.clone();
        }
        let build_id = host.modules().get(module).and_then(|it| it.build_id.as_deref().map(Into::into));
        let program = file_of_module(host, module);
        let program = program.map(|(path, file)| Arc::new(GoProgram::new(module, path, build_id, file)));
        self.go.known.insert(module, program.clone());
        program
    }

    /// Whether a process runs a Go program whose heap can be read.
    ///
    /// # Errors
    /// The process runs a Go program whose heap cannot be read; the text says why.
    pub(super) fn runs_readable_go(&self, pid: u32) -> Result<bool, String> {
        let Some(process) = self.go.processes.get(&pid) else { return Ok(false) };
        let unreadable = |why| format!("{}: Go's own heap cannot be read: {why}", process.program.path);
        process.program.program().map(|_| true).map_err(unreadable)
    }

    /// Targets that run Go programs now. Forgets ended processes.
    pub fn go_targets(&mut self, host: &mut Host) -> Vec<GoProcess> {
        let is_current = |host: &Host, process: &GoProcess| {
            host.processes().current(process.generation.pid).is_some_and(|it| it.id == process.generation)
        };
        self.go.processes.retain(|_, process| is_current(host, process));
        let mut targets: Vec<GoProcess> = self.go.processes.values().cloned().collect();
        targets.retain(|process| self.is_target(host, process.generation));
        targets.sort_unstable_by_key(|process| process.generation);
        targets
    }
}
