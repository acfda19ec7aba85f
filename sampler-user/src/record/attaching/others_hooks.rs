//! Inline hooks of another heapbpf, or of one that was killed: probes see nothing of a process that has them.

use std::collections::BTreeSet;

use super::modules::modules_of;
use super::probes::Attaching;
use crate::attach::inline::Refused;
use crate::attach::inline::removal::without_what_was_left;
use crate::host::Host;
use crate::host::mappings::ModuleId;
use crate::host::process::ProcessInfo;
use heapbpf_remote::blob_range;

/// Where the code of inline hooks is mapped, if that is what a module is.
fn base_of(host: &Host, module: ModuleId) -> Option<u64> {
    host.modules().get(module).and_then(|module| blob_range(&module.path)).map(|range| range.start)
}

fn has_inline_hooks(host: &Host, pid: u32) -> bool {
    modules_of(host, pid).into_iter().any(|module| base_of(host, module).is_some())
}

impl Attaching {
    /// Takes out of targets what a heapbpf that was killed left in them. Of what cannot be taken out it is told.
    pub(super) fn take_out_what_was_left(&mut self, running: &[ProcessInfo], host: &Host) {
        // Where processes are hooked inline at once, that comes first in each.
        if self.inline.is_some() && !self.global {
            return;
        }
        let all = host.processes().iter().map(|incarnation| incarnation.id.pid).filter(|_| self.global);
        let pids: BTreeSet<u32> = running.iter().map(|process| process.pid).chain(all).collect();
        for pid in pids.into_iter().filter(|pid| has_inline_hooks(host, *pid)) {
            match without_what_was_left(pid, &|_| false) {
                Ok(_) => {}
                Err(why) if why.blinds_probes() => self.is_unseen(pid, &why.to_string()),
                Err(why) => self.is_unseen(pid, &format!("its inline hooks cannot be taken out: {why}")),
            }
        }
    }

    /// Tells of a target that another heapbpf begins to hook inline.
    pub(super) fn note_others_hooks(&mut self, host: &Host, pid: u32, module: ModuleId) {
        let Some(base) = base_of(host, module) else { return };
        if !self.targets.coverages.contains_key(&pid) {
            return;
        }
        let is_ours = self.inline.as_ref().is_some_and(|inline| {
            inline.has_mapped(pid, base) || self.control.has_inherited_hooks(pid) || inline.has_inherited(pid)
        });
        if is_ours {
            return;
        }
        // What this recording mapped, and unmapped again, is gone by now. Whoever maps it traces the process at this moment.
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        let is_there = |line: &str| {
            line.find("/memfd:").and_then(|at| blob_range(&line[at..])).is_some_and(|range| range.start == base)
        };
        if maps.lines().any(is_there) {
            self.is_unseen(pid, &Refused::Hooked.to_string());
        }
    }

    fn is_unseen(&mut self, pid: u32, why: &str) {
        let comm = ProcessInfo::read(pid).map(|process| process.comm.to_string()).unwrap_or_default();
        let why = format!("process {pid} ({comm}): {why}");
        if !self.global {
            log::warn!("{why}");
        }
        self.refuse(why);
    }
}
