//! CPU time of targets that are taken in one by one: who is counted, who is busy and should be taken in, and
//! how much was counted.

use std::collections::HashSet;

use heapbpf_attach::inline::InlineHooks;
use heapbpf_audit::Hook;
use heapbpf_host::Host;
use heapbpf_host::clock::monotonic_ns;
use heapbpf_host::process::ProcessInfo;
use heapbpf_kernel::control::CountedBy;
use heapbpf_profile::units;
use sampler_ebpf::abi::{LivingThread, ProcessKey, Progress};

use super::probes::{Attaching, Spent};
use crate::budget::activity::CpuTime;

impl Attaching {
    /// Notes children that have the hooks of their parents, and processes that lost their hooks because one died of its
    /// own. Returns the process generations whose calls are counted inline.
    pub(crate) fn note_heirs(&mut self) -> HashSet<ProcessKey> {
        let (heirs, counted) = self.inline.as_mut().map(InlineHooks::look_for_heirs).unwrap_or_default();
        heirs.into_iter().for_each(|pid| self.standing.note(pid, Ok(())));
        if let Some(at_ns) = self.tripped.as_ref().map(|tripped| tripped.at_ns) {
            let stopped = self.inline.as_mut().map(|inline| std::mem::take(&mut inline.stopped)).unwrap_or_default();
            for process in stopped {
                if self.is_current_program(process) {
                    self.note_given_up(process, at_ns);
                }
            }
        }
        counted
    }

    /// Updates the CPU time of all threads. `inline`: the processes that [`Self::note_heirs`] has just returned.
    /// Returns the processes that should be taken in now; named processes are taken in anyway.
    pub(crate) fn look_at_activity(
        &mut self,
        host: &mut Host,
        threads: &[LivingThread],
        inline: &HashSet<ProcessKey>,
        now_ns: u64,
    ) -> Vec<ProcessKey> {
        let Some(mut activity) = self.activity.take() else { return Vec::new() };
        // While links are being made, nothing is counted. The BPF programs see it the same way.
        let has_links = |pid: u32| self.own.contains(&pid) && self.control.counted_by(pid) == Some(CountedBy::OwnLinks);
        let is_counted = |process: ProcessKey| inline.contains(&process) || has_links(process.tgid);
        let (are_all, own) = (self.is_listed_by_all(), std::process::id());
        let is_target = |process: ProcessKey| {
            // Whatever has memory is one. To describe a process takes several reads of /proc, and most end soon.
            if are_all {
                return process.tgid != own;
            }
            let current = host.processes().current(process.tgid).map(|generation| generation.id);
            current.is_some_and(|generation| self.is_target(host, generation))
        };
        activity.look(threads, now_ns, is_counted, is_target);
        let due = if self.global {
            activity.due(now_ns)
        } else {
            activity.rest(now_ns);
            Vec::new()
        };
        self.activity = Some(activity);
        due
    }

    /// Share of a process's CPU time in which its calls were counted; `None` if it is not known.
    pub(crate) fn cpu_share(&self, process: ProcessKey) -> Option<f64> {
        let Some(activity) = &self.activity else {
            return self.targets.share_if_late(process.tgid, || Spent::of_living(process.tgid));
        };
        let looked = activity.of(process).map(CpuTime::share);
        // Some processes start and end between two checks.
        let is_inline = self.standing.hook(process.tgid) == Hook::Inline;
        looked.or_else(|| is_inline.then(|| self.targets.seen(process.tgid, monotonic_ns()).share))
    }

    /// CPU time of the targets, where they are hooked one by one. `ended`: what the BPF programs added up.
    pub(crate) fn cpu_time(&self, host: &mut Host, ended: &Progress) -> Option<CpuTime> {
        Some(self.activity.as_ref()?.of_all(ended, |process| self.is_active_target(host, process)))
    }

    /// Reports how much of the targets' CPU time was counted, unless it was all of it.
    pub(crate) fn cpu_remark(&self, cpu: CpuTime, ended: &Progress) -> Option<String> {
        let percent = |ns: u64| units::percent(ns as f64 / cpu.all_ns.max(1) as f64);
        let short = ended.ended_uncounted;
        let (few, they) = if short == 1 { ("short process", "it") } else { ("short processes", "they") };
        let those = (short > 0).then(|| {
            format!(
                "; {} {few} ({}) ended before {they} could be counted",
                units::count(short as f64),
                percent(ended.ended_uncounted_ns)
            )
        });
        let line = format!("{} of the targets' CPU time was counted", percent(cpu.counted_ns));
        (self.global || short > 0 || cpu.share() < 0.9995).then(|| line + &those.unwrap_or_default())
    }

    /// Whether an active process is a target. heapbpf itself never is.
    pub(crate) fn is_active_target(&self, host: &mut Host, process: ProcessKey) -> bool {
        let Some(generation) = host.processes().current(process.tgid).map(|generation| generation.id) else {
            return false;
        };
        let has_joined = || {
            // Its name or cgroup may have changed since it started.
            let info = ProcessInfo::read(process.tgid).ok();
            info.is_some_and(|info| self.rules.iter().any(|rule| rule.matches(&info)))
        };
        process.tgid != std::process::id() && (self.is_target(host, generation) || self.members_change && has_joined())
    }
}
