//! The audit of a process, for its line in the profile: what is hooked in it and what could not be hooked. Also lists
//! targets in which nothing was counted.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use heapbpf_attach::dropped::dropped_mappings;
use heapbpf_audit::{FileAudit, Hook, Missing};
use heapbpf_host::Host;
use heapbpf_host::environment::php_calls_malloc;
use heapbpf_host::mappings::ModuleId;
use heapbpf_host::modules::ModuleTable;
use heapbpf_host::processes::{Generation, GenerationId};
use heapbpf_probes::{ProbeKind, Runtime};
use heapbpf_profile::model::Process;
use heapbpf_profile::units;

use super::probes::{Attaching, Look, Spent};
use super::targets::LateForks;
use crate::remarks::first_of;

/// The profile's note about `--mmap`, and what follows if mappings are sorted by their stacks.
const MAPPINGS_NOTE: &str = "anonymous mappings are included (functions mmap, mremap and brk), except those that an \
                             allocator makes for itself, so that no byte counts twice. What of them is in memory or \
                             swapped out counts as in use";
const SORTED_NOTE: &str = ". Beside inline hooks, the stack of each sample tells which those are: there are no exact \
                           totals (--hook probe has them)";

/// Python's object allocator, counted inside a process.
const OBJECTS: &str = "Python objects";

/// Maximum number of ended processes without an allocator that are kept, and how long each must have run, ns: shorter
/// ones may not have been examined, and hardly any has a reading of its memory.
const MOST_ENDED: usize = 64;
const SHORTEST_NS: u64 = 100_000_000;
/// A gap shorter than this between the start of a process and its inline hooks is not reported, ns.
const REPORTED_FROM_NS: u64 = 20_000_000;

/// What is hooked in a process, and what is not.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Audit {
    /// Allocators found, whether or not they were hooked in time.
    pub allocators: Vec<String>,
    /// Hooked files that the process maps.
    pub files: Vec<Arc<FileAudit>>,
    /// What else in its files is not hooked, and why.
    pub missing: Vec<Missing>,
}

impl Attaching {
    /// What is hooked in a process now, or was at its end.
    pub fn audit(&self, generation: &Generation, table: &ModuleTable) -> Audit {
        let modules: BTreeSet<ModuleId> = generation.space.modules().collect();
        let (mut audit, mut runtimes) = (Audit::default(), self.runtimes_in(generation));
        for look in modules.iter().filter_map(|module| self.modules.get(module)) {
            match look {
                Look::Announces(_) if !self.standing.announces(generation.id.pid) => {}
                Look::Hook(key) | Look::Announces(key) => {
                    let found = self.hooks.files.plan(*key).map(|planned| &planned.allocator);
                    audit.allocators.extend(found.filter(|name| !audit.allocators.contains(name)).cloned());
                    audit.files.extend(self.hooks.audited(*key).or_else(|| self.hooks.inline.get(key)).cloned());
                }
                Look::Nothing | Look::Runtime(_) => {}
                Look::Refused(missing) => audit.missing.push(missing.clone()),
            }
        }
        audit.missing.extend(modules.iter().filter_map(|module| self.missing_python(*module)));
        audit.missing.extend(modules.iter().filter_map(|module| self.missing_java(*module)));
        match self.standing.objects(generation.id.pid).filter(|_| runtimes.contains(&Runtime::Python)) {
            Some(Ok(since_ns)) => {
                runtimes.remove(&Runtime::Python);
                audit.allocators.push(OBJECTS.to_owned());
                audit.missing.push(Missing::free_lists());
                let joined_ns = self.targets.coverages.get(&generation.id.pid).map_or(0, |it| it.since_ns);
                let late_ns = since_ns.saturating_sub(joined_ns.max(generation.since_ns));
                audit.missing.extend((late_ns >= REPORTED_FROM_NS).then(|| Missing::early_objects(late_ns)));
            }
            Some(Err(why)) => {
                runtimes.remove(&Runtime::Python);
                audit.missing.push(Missing::new(Runtime::Python.heap(), why));
            }
            None => {}
        }
        audit.missing.extend(runtimes.into_iter().map(Runtime::missing));
        audit.missing.extend(dropped_mappings(&generation.space, table));
        // One file may be mapped under two names.
        let mut known = HashSet::new();
        audit.files.retain(|file| known.insert(Arc::as_ptr(file)));
        audit
    }

    /// Whether frees of a process are no longer tracked, so that its memory in use is unknown.
    pub fn stopped_tracking_frees_of(&self, generation: &Generation) -> bool {
        let pid = generation.id.pid;
        self.targets.is_hidden(pid) || self.targets.is_given_up(pid) || self.hooks.gave_up_frees
    }

    /// Whether frees of any process went untracked at some time: tracking was stopped, inline hooks of another heapbpf
    /// hid them, or hooks were taken out.
    pub fn lacked_frees(&self) -> bool {
        self.hooks.gave_up_frees || self.targets.some_hidden || self.targets.some_given_up
    }

    /// When tracking of a process's frees last resumed while it ran (CLOCK_MONOTONIC); `None` if they were always
    /// tracked.
    pub fn frees_tracked_since(&self, generation: &Generation) -> Option<u64> {
        let since = self.targets.seen_again_ns(generation.id.pid);
        since.filter(|since| *since > generation.since_ns)
    }

    /// Kinds of the probed instructions in the files that a process maps: in freeing functions if `frees`, otherwise in
    /// allocating ones. Empty if the process has ended.
    pub(crate) fn kinds_in(&self, host: &Host, pid: u32, frees: bool) -> Vec<ProbeKind> {
        self.allocators_of(host, pid).into_iter().flat_map(|key| self.hooks.kinds_in(key, frees)).collect()
    }

    /// Remarks about what could not be hooked. `seen`: processes that have a line in the profile.
    pub fn remarks(&self, seen: &HashSet<u32>) -> impl Iterator<Item = String> + '_ {
        let unseen = self.custom.iter().filter(|custom| !self.hooks.files.has_seen(|path| custom.is_for(path)));
        let unseen = unseen.map(|custom| format!("--alloc: no target mapped a file {}", custom.file));
        let sorted = if self.sorts_mappings() { SORTED_NOTE } else { "" };
        let mappings = self.hooks.mappings.is_some().then(|| format!("{MAPPINGS_NOTE}{sorted}"));
        self.refused
            .iter()
            .map(|reason| format!("not counted: {reason}"))
            .chain(self.tripped.as_ref().map(|tripped| tripped.remark.clone()))
            .chain(self.members.let_go_remark())
            .chain(unseen)
            .chain(self.missed_remarks(seen))
            .chain(self.late_forks())
            .chain(self.gaps_after_exec())
            .chain(self.others.remark(seen))
            .chain(mappings)
    }

    /// Whether remarks already explain why calls were not seen, so that no other reason needs to be guessed. `seen`:
    /// processes that have a line in the profile.
    pub fn explains_silence(&self, seen: &HashSet<u32>) -> bool {
        self.targets.some_hidden || !self.missed_remarks(seen).is_empty()
    }

    fn missed_remarks(&self, seen: &HashSet<u32>) -> Vec<String> {
        self.missed.remarks(seen, |forked| self.targets.was_hooked_at(forked.parent, forked.since_ns))
    }

    /// Reports how much was counted of children that were forked before links served them.
    fn late_forks(&self) -> Option<String> {
        let LateForks { processes, all_ns, counted_ns } = self.targets.late_forks(Spent::of_living);
        let (were, them) = if processes == 1 { ("child was", "it") } else { ("children were", "them") };
        let share = units::percent(counted_ns as f64 / all_ns.max(1) as f64);
        (processes > 0).then(|| {
            format!(
                "{processes} {were} forked before probes served {them}: {share} of the CPU time was counted, and what \
                 was allocated until then is missing. Inline hooks are inherited (--hook inline)"
            )
        })
    }

    /// Reports for which named targets the first calls after an exec are missing. The new program may have no line in
    /// the profile to report it on: these may have been its only calls.
    fn gaps_after_exec(&self) -> Option<String> {
        /// Maximum number of processes that are named.
        const NAMED: usize = 3;
        let gaps = if self.global { Vec::new() } else { self.targets.gaps_after_exec() };
        let gap = |(pid, gap_ns): &(u32, u64)| format!("{:.1} ms of {pid}", *gap_ns as f64 * 1e-6);
        let named = first_of(gaps.iter().map(gap), NAMED);
        let who = match gaps.len() {
            0 => return None,
            1 => "1 process".to_owned(),
            n => format!("{n} processes"),
        };
        Some(format!(
            "{who} ran for a moment before calls of a newly loaded allocator were counted; what was allocated by then \
             is missing: {named}"
        ))
    }

    /// Running targets that are not in `counted`, each with its start (CLOCK_BOOTTIME, ns) and when it began its program
    /// ([`Generation::since_ns`]). Applies only where processes become targets by a rule; named processes always count.
    /// Children of heapbpf itself are left out.
    pub(crate) fn idle_targets(&self, host: &mut Host, counted: &HashSet<u32>) -> Vec<(Process, u64, u64)> {
        if !self.global {
            return Vec::new();
        }
        let lives = |it: &&Generation| it.until_ns.is_none() && !counted.contains(&it.id.pid);
        let mut living: Vec<GenerationId> = host.processes().iter().filter(lives).map(|it| it.id).collect();
        living.sort_unstable();
        let own = std::process::id();
        let mut idle = Vec::with_capacity(living.len());
        for id in living {
            if !self.is_target(host, id) {
                continue;
            }
            let Some(generation) = host.processes().get(id).filter(|it| it.info.parent_pid != own) else { continue };
            idle.push((self.idle(generation), generation.info.start_ns, generation.since_ns));
        }
        idle
    }

    /// What is known of a process in which nothing was counted.
    fn idle(&self, generation: &Generation) -> Process {
        let info = &generation.info;
        Process {
            pid: generation.id.pid,
            namespace_pid: info.namespace_pid,
            comm: info.comm.to_string(),
            exe: info.exe.to_string(),
            cgroup: info.cgroup.to_string(),
            placement: info.placement.as_ref().clone(),
            allocators: self.allocators_in(generation).into_iter().map(str::to_owned).collect(),
            // Links that serve every process count it as well.
            hook: self.is_probed(generation).then_some(Hook::Probe),
            missing: self.runtimes_in(generation).into_iter().map(Runtime::missing).collect(),
            ..Process::default()
        }
    }

    /// Notes a named process that has ended, if no allocator was found in it: no count gives it a line.
    pub(super) fn note_without_allocator(&mut self, pid: u32, now_ns: u64, host: &Host) {
        let Some(generation) = host.processes().at(pid, now_ns) else { return };
        let was_short = now_ns.saturating_sub(generation.since_ns) < SHORTEST_NS;
        if was_short || self.without_allocator.len() >= MOST_ENDED {
            return;
        }
        let process = self.idle(generation);
        if process.lacks_allocator() {
            let missing = self.audit(generation, host.modules()).missing;
            self.without_allocator.push(Process { ended: true, missing, ..process });
        }
    }

    /// Whether one of a process's files has probes that serve every process.
    fn is_probed(&self, generation: &Generation) -> bool {
        let has_probes = |module| matches!(self.modules.get(&module), Some(Look::Hook(_)));
        !self.takes_in() && generation.space.modules().any(has_probes)
    }

    /// Names of the allocators in the examined files of a process, which tell how its heap can be read.
    pub(super) fn allocators_in(&self, generation: &Generation) -> BTreeSet<&str> {
        let files = generation.space.modules().filter_map(|module| self.modules.get(&module)?.file());
        files.filter_map(|key| Some(self.hooks.files.plan(key)?.allocator.as_str())).collect()
    }

    /// Runtimes with heaps of their own in the examined files of a process.
    pub(super) fn runtimes_in(&self, generation: &Generation) -> BTreeSet<Runtime> {
        let looks = generation.space.modules().filter_map(|module| self.modules.get(&module));
        let runtime = |look: &Look| match look {
            Look::Runtime(runtime) => Some(*runtime),
            Look::Announces(_) if !self.standing.announces(generation.id.pid) => None,
            Look::Hook(key) | Look::Announces(key) => self.hooks.files.unseen_heap(*key),
            Look::Nothing | Look::Refused(_) => None,
        };
        let is_seen = |runtime: &Runtime| *runtime == Runtime::Php && php_calls_malloc(generation.id.pid);
        looks.filter_map(runtime).filter(|runtime| !is_seen(runtime)).collect()
    }
}
