//! Inline hooks of another heapbpf, or of one that was killed: probes see nothing of a process that has them. When such
//! hooks arrive, their mapping is an event. No event reports their removal, so the mappings are polled until the hooks
//! are gone: the unobserved interval is overestimated rather than underestimated.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use heapbpf_attach::inline::removal::without_what_was_left;
use heapbpf_attach::inline::{InlineHooks, Refused, service};
use heapbpf_host::Host;
use heapbpf_host::clock::{monotonic_ns, thread_cpu_time};
use heapbpf_host::mappings::ModuleId;
use heapbpf_host::process::ProcessInfo;
use heapbpf_host::processes::GenerationId;
use heapbpf_remote::blob_range;

use super::probes::Attaching;
use super::runtimes::{mapped_since, modules_of};
use crate::remarks::first_of;

/// Shortest and longest time between two checks of the mappings of processes with hooks of others, ns. The time doubles
/// from check to check while all that is found is code that nothing leads to, in processes without probes.
const SHORTEST_PAUSE_NS: u64 = 100_000_000;
const LONGEST_PAUSE_NS: u64 = 1_600_000_000;
/// Minimum of that time as a multiple of the CPU time that a check takes.
const SHARE_OF_TIME: u32 = 500;
/// Maximum number of processes whose names are kept, and that a remark names.
const MOST_NAMES: usize = 4096;
const MOST_NAMED: usize = 3;

/// Inline hooks of other heapbpfs in targets.
#[derive(Debug, Default)]
pub struct OthersHooks {
    /// Processes that have mapped code of another heapbpf, and when their mappings were last checked (CLOCK_MONOTONIC).
    pub(super) watched: HashMap<u32, u64>,
    /// When all of them were last checked (CLOCK_MONOTONIC).
    looked_ns: u64,
    /// Time until the next check, ns, and its minimum because of what a check takes.
    pause_ns: u64,
    least_pause_ns: u64,
    /// Names of the targets that probes did not see for a while.
    names: BTreeMap<u32, String>,
    /// Whether another recording was found to count a target from inside.
    pub(crate) have_hooked: bool,
    /// How to see what the other recording counts, if it is a service: the end of a message.
    pub(crate) service: String,
}

impl OthersHooks {
    /// Time until the mappings of processes with hooks of others must be checked; `None` if there are no such
    /// processes.
    pub(super) fn until_look(&self, now_ns: u64) -> Option<Duration> {
        let next_ns = self.looked_ns.saturating_add(self.pause_ns.max(self.least_pause_ns));
        (!self.watched.is_empty()).then(|| Duration::from_nanos(next_ns.saturating_sub(now_ns)))
    }

    /// Watches a process, unless it is watched already, and has all checked soon. `since_ns`: when its mappings were
    /// last known (CLOCK_MONOTONIC).
    pub(super) fn watch(&mut self, pid: u32, since_ns: u64) {
        self.watched.entry(pid).or_insert(since_ns);
        self.pause_ns = SHORTEST_PAUSE_NS;
    }

    /// Sets the time of the next check, after one that took this much CPU time. `is_unused`: it found nothing but code
    /// that nothing leads to, in processes without probes.
    pub(super) fn looked(&mut self, took: Duration, now_ns: u64, is_unused: bool) {
        let doubled_ns = (2 * self.pause_ns).clamp(SHORTEST_PAUSE_NS, LONGEST_PAUSE_NS);
        self.pause_ns = if is_unused { doubled_ns } else { SHORTEST_PAUSE_NS };
        self.least_pause_ns = took.saturating_mul(SHARE_OF_TIME).as_nanos() as u64;
        self.looked_ns = now_ns;
    }

    /// Notes the name of a target that probes do not see.
    pub(super) fn name(&mut self, pid: u32, comm: String) {
        if self.names.len() < MOST_NAMES || self.names.contains_key(&pid) {
            self.names.insert(pid, comm);
        }
    }

    /// Targets that probes did not see for a while.
    pub(super) fn hidden(&self) -> impl Iterator<Item = u32> + '_ {
        self.names.keys().copied()
    }

    /// Reports targets that were not seen for a while and have no line in the profile to report it on. `seen`:
    /// processes that have one.
    pub(super) fn remark(&self, seen: &HashSet<u32>) -> Option<String> {
        let unlisted: Vec<_> = self.names.iter().filter(|(pid, _)| !seen.contains(pid)).collect();
        let named = first_of(unlisted.iter().map(|(pid, comm)| format!("{pid} ({comm})")), MOST_NAMED);
        match unlisted.len() {
            0 => None,
            1 => Some(format!("process {named}: what it allocated while another recording counted it is missing")),
            n => Some(format!(
                "{n} processes: what they allocated while another recording counted them is missing: {named}"
            )),
        }
    }
}

/// Code of inline hooks in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Code {
    /// It is mapped, but nothing leads there.
    Mapped,
    /// It replaces pages of the allocator.
    InPlace,
}

/// Code of another heapbpf in `/proc/PID/maps`, if there is any. `is_ours` says by the address where code is mapped
/// whether it is our own.
pub(super) fn code_of_others(maps: &str, is_ours: impl Fn(u64) -> bool) -> Option<Code> {
    let code = |line: &str| {
        let range = line.find("/memfd:").and_then(|at| blob_range(&line[at..]))?;
        let start = line.split('-').next().and_then(|start| u64::from_str_radix(start, 16).ok())?;
        let code = if range.contains(&start) { Code::Mapped } else { Code::InPlace };
        (!is_ours(range.start)).then_some(code)
    };
    maps.lines().filter_map(code).max()
}

/// Where the code of inline hooks is mapped, if a module is such code.
fn base_of(host: &Host, module: ModuleId) -> Option<u64> {
    host.modules().get(module).and_then(|module| blob_range(&module.path)).map(|range| range.start)
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
        pids.retain(|pid| modules_of(host, *pid).into_iter().any(|module| base_of(host, module).is_some()));
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
                self.note_unseen(pid, 0, what, &why);
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
            self.note_unseen(pid, since_ns, "", &Refused::Hooked);
        } else {
            self.others.watch(pid, since_ns);
        }
    }

    /// Whether code of inline hooks in a process belongs to this recording.
    fn is_ours(&self, pid: u32, base: u64) -> bool {
        let has_inherited =
            |inline: &InlineHooks| self.is_listed_heir(pid) || inline.counted.all_heirs().contains(&pid);
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
        let cpu_before = thread_cpu_time();
        let (mut is_any_seen, mut is_any_used) = (false, false);
        // Once for all: it reads the kernel's whole list.
        let heirs = self.inline.as_ref().map(|inline| inline.counted.all_heirs()).unwrap_or_default();
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
                self.note_unseen(pid, looked_ns, "", &Refused::Hooked);
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
        let took = thread_cpu_time().saturating_sub(cpu_before);
        self.others.looked(took, monotonic_ns(), !is_any_used && !is_any_probed);
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

    /// Notes that probes have not seen a target since a given time (CLOCK_MONOTONIC), and reports it. `what`: the
    /// report's words before the reason.
    pub(super) fn note_unseen(&mut self, pid: u32, since_ns: u64, what: &str, why: &Refused) {
        let is_known = self.targets.is_hidden(pid);
        self.targets.hidden_since(pid, since_ns);
        self.others.watch(pid, monotonic_ns());
        // Each of its allocators has the same reason.
        if is_known {
            return;
        }
        self.others.have_hooked |= matches!(why, Refused::Hooked);
        let comm = comm_of(pid);
        let service = if self.global { String::new() } else { service::pointer_to(pid) };
        let why = format!("process {pid} ({comm}): {what}{why}{service}");
        if !service.is_empty() {
            self.others.service = service;
        }
        self.others.name(pid, comm);
        if !self.global {
            log::warn!("{why}");
        }
        self.refuse(why);
    }
}

fn comm_of(pid: u32) -> String {
    ProcessInfo::read(pid).map(|process| process.comm.to_string()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hooks_are_in_place_where_pages_outside_of_their_range_are_mapped() {
        let of = |lines: &[&str]| {
            let lines = lines.iter().map(|line| format!("{line} 00000000 00:01 1035"));
            let name = "/memfd:heapbpf-inline-7f0000000000-6000 (deleted)";
            lines.map(|line| format!("{line} {name}\n")).collect::<String>()
        };
        let libc = "7f1000000000-7f1000028000 r--p 00000000 fe:01 77 /usr/lib/libc.so.6\n";
        let mapped = of(&["7f0000000000-7f0000002000 r-xp", "7f0000002000-7f0000006000 rw-p"]);
        let in_place = of(&["7f1000028000-7f1000029000 r-xp"]);
        let code = |maps: &str| code_of_others(maps, |_| false);
        assert_eq!((code(""), code(libc)), (None, None));
        assert_eq!(code(&format!("{mapped}{libc}")), Some(Code::Mapped));
        assert_eq!(code(&format!("{mapped}{libc}{in_place}")), Some(Code::InPlace));
        assert_eq!(code_of_others(&format!("{mapped}{in_place}"), |base| base == 0x7f00_0000_0000), None, "ours");
    }

    #[test]
    fn code_that_nothing_leads_to_is_looked_at_less_and_less_often() {
        const MS: u64 = 1_000_000;
        let mut others = OthersHooks::default();
        assert_eq!(others.until_look(MS), None, "nothing is watched");
        others.watch(7, MS);
        assert_eq!(others.until_look(5_000 * MS), Some(Duration::ZERO), "the first look comes at once");
        let until = |others: &OthersHooks, now_ms: u64| others.until_look(now_ms * MS).unwrap().as_millis();
        let mut now_ms = 5_000;
        let pauses = [true; 6].map(|is_unused| {
            others.looked(Duration::ZERO, now_ms * MS, is_unused);
            let pause_ms = until(&others, now_ms);
            now_ms += 10_000;
            pause_ms
        });
        assert_eq!(pauses, [200, 400, 800, 1_600, 1_600, 1_600]);
        others.looked(Duration::ZERO, now_ms * MS, false);
        assert_eq!(until(&others, now_ms), 100, "hooks were found");
        others.looked(Duration::ZERO, now_ms * MS, true);
        assert_eq!(until(&others, now_ms), 200);
        others.watch(8, now_ms * MS);
        assert_eq!(until(&others, now_ms), 100, "a new process");
        others.looked(Duration::from_millis(4), (now_ms + 4) * MS, true);
        assert_eq!(until(&others, now_ms + 4), 2_000, "looking may take a five hundredth of the time");
        assert_eq!(others.watched[&7], MS);
    }

    #[test]
    fn processes_without_a_line_are_named() {
        let mut others = OthersHooks::default();
        assert_eq!(others.remark(&HashSet::new()), None);
        others.names.insert(7, "seven".into());
        assert_eq!(
            others.remark(&HashSet::new()).as_deref(),
            Some("process 7 (seven): what it allocated while another recording counted it is missing")
        );
        assert_eq!(others.remark(&HashSet::from([7])), None, "its line tells");
        others.names.extend((1..=4).map(|pid| (pid, "x".to_owned())));
        let remark = others.remark(&HashSet::from([2])).unwrap();
        assert!(
            remark.starts_with("4 processes: ") && remark.ends_with("is missing: 1 (x), 3 (x), 4 (x), …"),
            "{remark}"
        );
    }
}
