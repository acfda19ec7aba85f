//! Inline hooks of another heapbpf, or of one that was killed: probes see nothing of a process that has them. When such
//! hooks arrive, their mapping is an event. No event reports their removal, so the mappings are polled until the hooks
//! are gone: the unobserved interval is overestimated rather than underestimated.

use std::collections::{BTreeSet, HashSet};

use heapbpf_attach::inline::removal::without_what_was_left;
use heapbpf_attach::inline::{InlineHooks, Refused, service};
use heapbpf_host::Host;
use heapbpf_host::clock::monotonic_ns;
use heapbpf_host::mappings::ModuleId;
use heapbpf_host::process::ProcessInfo;
use heapbpf_host::processes::GenerationId;
use heapbpf_remote::blob_range;

use super::mapped::{mapped_since, modules_of};
use super::others::{Code, code_of_others};
use super::probes::Attaching;

/// Where the code of inline hooks is mapped, if a module is such code.
fn base_of(host: &Host, module: ModuleId) -> Option<u64> {
    host.modules().get(module).and_then(|module| blob_range(&module.path)).map(|range| range.start)
}

fn has_inline_hooks(host: &Host, pid: u32) -> bool {
    modules_of(host, pid).into_iter().any(|module| base_of(host, module).is_some())
}

impl Attaching {
    /// Takes hooks that a killed heapbpf left behind out of targets. Reports those that cannot be taken out.
    pub(super) fn take_out_what_was_left(&mut self, running: &[ProcessInfo], host: &mut Host) {
        // Where processes are hooked inline at once, that starts with taking out old hooks.
        if self.inline.is_some() && !self.global {
            return;
        }
        let all = host.processes().iter().map(|generation| generation.id.pid).filter(|_| self.global);
        let mut pids: BTreeSet<u32> = running.iter().map(|process| process.pid).chain(all).collect();
        pids.retain(|pid| has_inline_hooks(host, *pid));
        for pid in pids {
            let left = without_what_was_left(pid, &|_| false);
            let current = host.processes().current(pid).map(|generation| generation.id);
            let is_target = current.is_some_and(|generation| self.is_target(host, generation));
            if !is_target && running.iter().all(|process| process.pid != pid) {
                continue;
            }
            // Another heapbpf may use the mapped code again, which no event reports.
            self.others.watch(pid, monotonic_ns());
            if let Err(why) = left {
                let what = if why.blinds_probes() { "" } else { "its inline hooks cannot be removed: " };
                self.is_unseen(pid, 0, &format!("{what}{why}"));
            }
        }
    }

    /// Handles a target that another heapbpf begins to hook inline, and reports it.
    pub(super) fn note_others_hooks(&mut self, host: &mut Host, generation: GenerationId, module: ModuleId) {
        let Some(base) = base_of(host, module) else { return };
        let pid = generation.pid;
        let since_ns = mapped_since(host, generation, module);
        // The next check tells whether it is ours.
        if self.inline.as_ref().is_some_and(|inline| inline.prepares(pid)) {
            self.others.watch(pid, since_ns);
            return;
        }
        if self.is_ours(pid, base) || !self.is_target(host, generation) {
            return;
        }
        // Code that this recording mapped and could not use is still there.
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        if self.inline.is_none() || code_of_others(&maps, |other| other != base) == Some(Code::InPlace) {
            self.is_unseen(pid, since_ns, &Refused::Hooked.to_string());
        } else {
            self.others.watch(pid, since_ns);
        }
    }

    /// Whether code of inline hooks in a process belongs to this recording.
    fn is_ours(&self, pid: u32, base: u64) -> bool {
        let has_inherited = |inline: &InlineHooks| self.is_listed_heir(pid) || inline.has_inherited(pid);
        self.has_mapped(pid, base) || self.inline.as_ref().is_some_and(has_inherited)
    }

    fn has_mapped(&self, pid: u32, base: u64) -> bool {
        self.inline.as_ref().is_some_and(|inline| inline.has_mapped(pid, base))
    }

    fn is_listed_heir(&self, pid: u32) -> bool {
        self.inline.is_some() && self.control.has_inherited_hooks(pid)
    }

    /// Notes that a child inherited inline hooks of others from its parent.
    pub(super) fn inherit_others_hooks(&mut self, parent: u32, child: u32, time_ns: u64) {
        if self.others.watched.contains_key(&parent) {
            if self.targets.is_hidden(parent) {
                self.targets.hidden_since(child, time_ns);
                self.others.name(child, comm_of(child));
            }
            self.others.watched.insert(child, time_ns);
        }
    }

    /// Checks whether processes still have inline hooks of others, if it is time. Returns whether probes see a process
    /// again that had them.
    pub fn look_at_others_hooks(&mut self, now_ns: u64) -> bool {
        if self.others.until_look(now_ns).is_none_or(|left| !left.is_zero()) {
            return false;
        }
        let (mut is_any_seen, mut is_any_used) = (false, false);
        // Once for all: it reads the kernel's whole list.
        let heirs = self.inline.as_ref().map(InlineHooks::heirs).unwrap_or_default();
        for (pid, looked_ns) in std::mem::take(&mut self.others.watched) {
            let begun_ns = monotonic_ns();
            let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
            // The process has ended, and was not seen up to then.
            if maps.is_empty() || !self.targets.is_running(pid) {
                continue;
            }
            let is_heir = heirs.contains(&pid) || self.is_listed_heir(pid);
            let code = code_of_others(&maps, |base| is_heir || self.has_mapped(pid, base));
            if code == Some(Code::InPlace) && self.targets.is_hidden(pid) {
                self.targets.hidden_since(pid, looked_ns);
            } else if code == Some(Code::InPlace) {
                self.is_unseen(pid, looked_ns, &Refused::Hooked.to_string());
            } else if self.targets.seen_again(pid, monotonic_ns()) {
                log::info!("process {pid}: no other recording hooks it inline any more; its calls are counted again");
                is_any_seen = true;
            }
            is_any_used |= code == Some(Code::InPlace);
            // Code without jumps may stay for good, or belong to hooks that are being installed right now.
            if code.is_some() {
                self.others.watched.insert(pid, begun_ns);
            }
        }
        // What probes count must not be hidden from them for long.
        let is_any_probed = self.others.watched.keys().any(|pid| !self.takes_in() || self.own.contains(pid));
        self.others.looked(now_ns, monotonic_ns(), !is_any_used && !is_any_probed);
        is_any_seen
    }

    /// Running targets whose current programs probes did not see for a while.
    pub(crate) fn hidden_targets(&self, host: &mut Host) -> HashSet<u32> {
        let hidden = self.others.hidden().filter(|pid| self.targets.was_hidden(*pid));
        let is_target = |pid: &u32| {
            let current = host.processes().current(*pid).map(|generation| generation.id);
            current.is_some_and(|generation| self.is_target(host, generation))
        };
        hidden.filter(is_target).collect()
    }

    /// Notes that probes have not seen a target since a given time (CLOCK_MONOTONIC), and reports it.
    pub(super) fn is_unseen(&mut self, pid: u32, since_ns: u64, why: &str) {
        let is_known = self.targets.is_hidden(pid);
        self.targets.hidden_since(pid, since_ns);
        self.others.watch(pid, monotonic_ns());
        let comm = comm_of(pid);
        let service = if is_known || self.global { String::new() } else { service::pointer_to(pid) };
        let why = format!("process {pid} ({comm}): {why}{service}");
        self.others.name(pid, comm);
        if !self.global && !is_known {
            log::warn!("{why}");
        }
        self.refuse(why);
    }
}

fn comm_of(pid: u32) -> String {
    ProcessInfo::read(pid).map(|process| process.comm.to_string()).unwrap_or_default()
}
