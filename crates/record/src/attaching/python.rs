//! Python interpreters in the targets: tells the BPF programs where each interpreter keeps its frames.

use std::sync::Arc;
use std::time::{Duration, Instant};

use heapbpf_attach::detours::{Detours, Leads, NotLed};
use heapbpf_audit::Missing;
use heapbpf_host::Host;
use heapbpf_host::mappings::ModuleId;
use heapbpf_host::modules::ModuleSource;
use heapbpf_host::processes::GenerationId;
use heapbpf_python::Runtime;

use super::probes::{Attaching, Look};

/// How long to wait for the loader to fill in a table of allocators.
const PATIENCE: Duration = Duration::from_secs(3);
/// Text of a remark: which objects are not counted.
const COPIES: &str = "only some are counted, because the compiler inlined the object allocator into some callers, and these \
                      copies cannot be bypassed";

impl Attaching {
    /// Interpreters found since the last call.
    pub fn take_new_interpreters(&mut self) -> Vec<(ModuleId, Arc<Runtime>)> {
        std::mem::take(&mut self.interpreters.new)
    }

    /// Searches the modules of the processes that run at the start for interpreters, JVMs and Go programs.
    pub(super) fn find_runtimes(&mut self, host: &mut Host, pids: impl Iterator<Item = u32>) {
        for pid in pids {
            let Some(generation) = host.processes().current(pid) else { continue };
            let (id, modules) = (generation.id, generation.space.modules().collect::<Vec<_>>());
            for module in modules {
                self.note_interpreter(host, id, module);
                self.note_jvm(host, module);
                self.note_go(host, id, module);
            }
        }
    }

    /// If a module is an interpreter, tells the BPF programs where it keeps the frames of a process.
    pub(super) fn note_interpreter(&mut self, host: &mut Host, generation: GenerationId, module: ModuleId) {
        let Some(runtime) = self.interpreter(host, module) else { return };
        let process = host.processes().get(generation);
        let address = process.and_then(|process| {
            let mut mappings = process.space.current().iter().filter(|mapping| mapping.module == module);
            mappings.find_map(|mapping| runtime.address_in(mapping.start, mapping.file_offset))
        });
        let Some(address) = address else { return };
        self.lead_around(generation, module, address.wrapping_sub(runtime.address));
        let python = runtime.layout.of_process(address);
        match self.control.set_python(generation.pid, &python) {
            Ok(()) => log::debug!("process {} runs Python {} at {address:#x}", generation.pid, runtime.version),
            Err(error) => log::info!("Python frames of process {} are not read: {error}", generation.pid),
        }
    }

    /// Makes an interpreter call its object allocator itself, if that is counted: it may run copies of the allocator
    /// instead. `bias`: address in the process minus address in the file.
    fn lead_around(&mut self, generation: GenerationId, module: ModuleId, bias: u64) {
        let Some(key) = self.modules.get(&module).and_then(Look::file) else { return };
        let Some(table) = self.hooks.files.objects(key) else { return };
        let pid = generation.pid;
        let why = match Detours::look(pid, table, bias) {
            Ok(Leads::There | Leads::ToWrappers) if table.has_copies => self
                .detours
                .lead(pid, table, bias)
                .err()
                .map(|why| (format!("{COPIES}: {why}"), matches!(why, NotLed::Stop(_)))),
            Ok(Leads::There | Leads::Around | Leads::ToWrappers) => None,
            Ok(Leads::ToMalloc) => Some(("its interpreter calls malloc for each, which counts them".into(), false)),
            Ok(Leads::Nowhere) => Some(("its table of allocators is empty".into(), true)),
            Ok(Leads::Elsewhere) => Some(("its table of allocators leads to functions of another file".into(), false)),
            Err(error) => Some((format!("its memory cannot be read: {error}"), false)),
        };
        let Some((why, may_pass)) = why else { return };
        let until = self.interpreters.awaited(generation, module).unwrap_or_else(|| Instant::now() + PATIENCE);
        if may_pass && Instant::now() < until {
            self.interpreters.unled.push((generation, module, until));
        } else {
            self.refuse(format!("process {pid}: Python's objects: {why}"));
        }
    }

    /// Checks interpreters again whose tables of allocators were not ready.
    pub(super) fn lead_late_ones(&mut self, host: &mut Host) {
        for (generation, module, until) in std::mem::take(&mut self.interpreters.unled) {
            self.interpreters.retried = Some((generation, module, until));
            self.note_interpreter(host, generation, module);
        }
        self.interpreters.retried = None;
    }

    fn interpreter(&mut self, host: &mut Host, module: ModuleId) -> Option<Arc<Runtime>> {
        if let Some(known) = self.interpreters.known.get(&module) {
            return known.clone();
        }
        let mut found = None;
        if self.runtime_of(module) == Some(heapbpf_probes::Runtime::Python) {
            let path = host.modules().get(module).map(|module| Arc::clone(&module.path))?;
            let Ok(ModuleSource::File(file)) = host.modules_mut().source(module) else { return None };
            match Runtime::find(&*file, &path) {
                Ok(runtime) => found = runtime.map(Arc::new),
                Err(why) => {
                    log::info!("{path}: {why}");
                    self.interpreters.refused.insert(module, why);
                }
            }
        }
        self.interpreters.known.insert(module, found.clone());
        self.interpreters.new.extend(found.iter().map(|runtime| (module, Arc::clone(runtime))));
        found
    }

    /// Why Python frames of a module are not shown, if they are not.
    pub(super) fn missing_python(&self, module: ModuleId) -> Option<Missing> {
        self.interpreters.refused.get(&module).map(Missing::python_frames)
    }
}
