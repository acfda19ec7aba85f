//! Go programs among the targets: which processes have a heap that the Go runtime samples.

use std::sync::Arc;

use heapbpf_host::Host;
use heapbpf_host::mappings::ModuleId;
use heapbpf_host::modules::ModuleSource;
use heapbpf_host::processes::GenerationId;
use heapbpf_probes::Runtime;
use heapbpf_symbols::go::GoProgram;

pub use super::interpreters::GoProcess;
use super::probes::{Attaching, Look};

impl Attaching {
    /// If a module is a Go program, notes that a process runs it.
    pub(super) fn note_go(&mut self, host: &mut Host, generation: GenerationId, module: ModuleId) {
        if self.runtime_of(module) != Some(Runtime::Go) {
            return;
        }
        let Some(program) = self.go_program(host, module) else { return };
        let mapping = host
            .processes()
            .get(generation)
            .and_then(|process| process.space.current().iter().find(|mapping| mapping.module == module).copied());
        let Some(mapping) = mapping else { return };
        log::debug!("process {} runs the Go program {}", generation.pid, program.path);
        // The program is mapped first; its plugins have no heap of their own.
        let process = self.go.processes.entry(generation.pid);
        let process = process.or_insert_with(|| GoProcess { generation, program: Arc::clone(&program), mapping });
        if process.generation != generation {
            *process = GoProcess { generation, program, mapping };
        }
    }

    /// The language runtime in an examined module.
    pub(super) fn runtime_of(&self, module: ModuleId) -> Option<Runtime> {
        match self.modules.get(&module)? {
            Look::Runtime(runtime) => Some(*runtime),
            Look::Hook(key) | Look::Announces(key) => self.hooks.files.runtime(*key),
            Look::Nothing | Look::Refused(_) => None,
        }
    }

    fn go_program(&mut self, host: &mut Host, module: ModuleId) -> Option<Arc<GoProgram>> {
        if let Some(known) = self.go.known.get(&module) {
            return known.clone();
        }
        let known = host.modules().get(module).map(|it| (Arc::clone(&it.path), it.build_id.as_deref().map(Into::into)));
        let source = host.modules_mut().source(module);
        let program = match (known, source) {
            (Some((path, build_id)), Ok(ModuleSource::File(file))) => {
                Some(Arc::new(GoProgram::new(module, path, build_id, file)))
            }
            _ => None,
        };
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
        let all: Vec<GoProcess> = self.go.processes.values().cloned().collect();
        let mut targets: Vec<GoProcess> =
            all.into_iter().filter(|process| self.is_target(host, process.generation)).collect();
        targets.sort_unstable_by_key(|process| process.generation);
        targets
    }

    /// Whether any process is a target, or was one.
    pub(crate) fn has_targets(&self, host: &mut Host) -> bool {
        let living: Vec<GenerationId> = host.processes().iter().map(|generation| generation.id).collect();
        self.had_targets || living.into_iter().any(|generation| self.is_target(host, generation))
    }

    /// Whether a process generation belongs to a target.
    pub(super) fn is_target(&self, host: &mut Host, generation: GenerationId) -> bool {
        if !self.global {
            return self.targets.named_alive.contains(&generation.pid);
        }
        let matches = |host: &mut Host| {
            host.describe(generation).is_some_and(|info| self.rules.iter().any(|rule| rule.matches(&info)))
        };
        self.followed.contains(&generation.pid) || matches(host)
    }
}
