//! JVMs in the targets: where each describes itself.

use std::sync::Arc;

use super::probes::Attaching;
use crate::host::Host;
use crate::host::mappings::ModuleId;
use crate::host::modules::ModuleSource;
use crate::host::processes::IncarnationId;
use heapbpf_audit::Missing;
use heapbpf_java::{Library, Tables};
use heapbpf_probes::Runtime;

impl Attaching {
    /// Processes that have mapped a JVM since the last call.
    pub fn take_new_jvms(&mut self) -> Vec<(u32, Tables)> {
        std::mem::take(&mut self.jvms.new)
    }

    /// If a module is a JVM, notes where it describes itself in a process.
    pub(super) fn note_jvm(&mut self, host: &mut Host, incarnation: IncarnationId, module: ModuleId) {
        if self.runtime_of(module) != Some(Runtime::Java) {
            return;
        }
        let Some(library) = self.jvm(host, module) else { return };
        let tables = host.processes().get(incarnation).and_then(|process| {
            let mut mappings = process.space.current().iter().filter(|mapping| mapping.module == module);
            mappings.find_map(|mapping| library.tables_in(mapping.start, mapping.file_offset))
        });
        if let Some(tables) = tables {
            log::debug!("process {} runs a JVM", incarnation.pid);
            self.jvms.new.push((incarnation.pid, tables));
        }
    }

    fn jvm(&mut self, host: &mut Host, module: ModuleId) -> Option<Arc<Library>> {
        if let Some(known) = self.jvms.known.get(&module) {
            return known.clone();
        }
        let path = host.modules().get(module).map(|module| Arc::clone(&module.path))?;
        let Ok(ModuleSource::File(file)) = host.modules_mut().source(module) else { return None };
        let found = match Library::find(&*file) {
            Ok(library) => library.map(Arc::new),
            Err(why) => {
                log::info!("{path}: {why}");
                self.jvms.refused.insert(module, why);
                None
            }
        };
        self.jvms.known.insert(module, found.clone());
        found
    }

    /// Why Java frames of a module are not shown, if they are not.
    pub(super) fn missing_java(&self, module: ModuleId) -> Option<Missing> {
        self.jvms.refused.get(&module).map(Missing::java_frames)
    }
}
