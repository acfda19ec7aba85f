//! JVMs in the targets that heapbpf cannot read. (The intake finds the readable ones right before it needs them.)

use heapbpf_audit::Missing;
use heapbpf_host::Host;
use heapbpf_host::mappings::ModuleId;
use heapbpf_host::modules::ModuleSource;
use heapbpf_java::Library;
use heapbpf_probes::Runtime;

use super::probes::Attaching;

impl Attaching {
    /// If a module is a JVM that does not describe itself, notes the reason.
    pub(super) fn note_jvm(&mut self, host: &mut Host, module: ModuleId) {
        if self.runtime_of(module) != Some(Runtime::Java) || !self.jvms.looked_at.insert(module) {
            return;
        }
        let Ok(ModuleSource::File(file)) = host.modules_mut().source(module) else { return };
        if let Err(why) = Library::find(&*file) {
            log::info!("module {module:?}: {why}");
            self.jvms.refused.insert(module, why);
        }
    }

    /// Why Java frames of a module are not shown, if they are not.
    pub(super) fn missing_java(&self, module: ModuleId) -> Option<Missing> {
        self.jvms.refused.get(&module).map(Missing::java_frames)
    }
}
