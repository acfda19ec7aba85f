//! Processes that have no allocator to hook, but announce their samples.
//!
//! The links on a file's announcements serve every process that maps the file, but count only processes that are listed
//! for them. So a process whose allocator is probed is never counted twice, whatever it maps later.

use heapbpf_attach::files::FileKey;
use heapbpf_attach::hooks::{HookError, Hooked};
use heapbpf_host::Host;
use heapbpf_host::clock::monotonic_ns;
use heapbpf_host::processes::HostChange;
use heapbpf_kernel::control::CountedBy;
use heapbpf_probes::FileKind;

use super::modules::Unhooked;
use super::probes::Attaching;
use super::runtimes::modules_of;

/// Time after a program's start by which its loader has mapped its libraries, including its allocator.
const LOADED_AFTER_NS: u64 = 300_000_000;

impl Attaching {
    /// Counts what a file announces in a process that maps it, unless an allocator of the process is hooked.
    pub(super) fn follow_announcements(&mut self, host: &mut Host, key: FileKey, pid: u32) -> Result<Hooked, Unhooked> {
        if !self.standing.announces_for_lack_of_allocator(pid) {
            let modules = modules_of(host, pid);
            let id = host.processes().current(pid).map(|generation| generation.id);
            if modules.into_iter().any(|module| self.file_of(host, module).is_some())
                || !id.is_some_and(|id| self.is_target(host, id))
            {
                return Err(Unhooked::Known);
            }
            let is_static = self.hooks.files.plan(key).is_some_and(|plan| plan.kind == FileKind::StaticExecutable);
            let since_ns = host.processes().current(pid).map_or(0, |generation| generation.since_ns);
            if !self.is_starting && !is_static && monotonic_ns() < since_ns.saturating_add(LOADED_AFTER_NS) {
                return Err(Unhooked::Waits);
            }
        }
        let hooked = self.link(key, None);
        if matches!(hooked, Err(HookError::UnderWay { .. })) {
            return Err(Unhooked::Waits);
        }
        let listed = hooked.map_err(|error| error.to_string()).and_then(|hooked| {
            // An exec takes the process off the list, so it is listed again after one.
            let listed = self.control.add_target(pid, CountedBy::Announcements);
            listed.map(|()| hooked).map_err(|error| error.to_string())
        });
        match listed {
            Ok(hooked) => {
                self.standing.note_announcing(pid, true);
                Ok(hooked)
            }
            Err(reason) => {
                self.refuse(reason);
                Err(Unhooked::Known)
            }
        }
    }

    /// Notes that a process that announced its samples runs another program, or that its child announces them too.
    pub(super) fn note_announcing(&mut self, host: &Host, change: &HostChange) {
        match change {
            HostChange::Replaced(_, next) if self.standing.announces_for_lack_of_allocator(next.pid) => {
                let announces = self.control.counted_by(next.pid) == Some(CountedBy::Announcements);
                self.standing.note_announcing(next.pid, announces);
            }
            HostChange::Started(child) => {
                if let Some(generation) = host.processes().get(*child) {
                    self.inherit_announcing(generation.info.parent_pid, child.pid, generation.since_ns);
                }
            }
            _ => {}
        }
    }

    /// Treats a child like its parent: it has the same mappings, and the kernel has listed it the same way.
    pub(super) fn inherit_announcing(&mut self, parent: u32, child: u32, since_ns: u64) {
        let announces = self.control.counted_by(child) == Some(CountedBy::Announcements);
        if announces && self.standing.announces_for_lack_of_allocator(parent) {
            self.targets.hooked(child, since_ns, since_ns);
        }
        if announces || self.standing.announces_for_lack_of_allocator(child) {
            self.standing.note_announcing(child, announces);
        }
    }
}
