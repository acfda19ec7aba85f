//! Targets in which nothing was counted.

use std::collections::{BTreeSet, HashSet};

use heapbpf_audit::Hook;
use heapbpf_host::Host;
use heapbpf_host::environment::php_calls_malloc;
use heapbpf_host::processes::{Generation, GenerationId};
use heapbpf_probes::Runtime;
use heapbpf_profile::model::Process;

use super::probes::{Attaching, Look};

impl Attaching {
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
        let mut idle = Vec::new();
        for id in living {
            if !self.is_target(host, id) {
                continue;
            }
            let Some(generation) = host.processes().get(id).filter(|it| it.info.parent_pid != own) else { continue };
            let info = &generation.info;
            let process = Process {
                pid: id.pid,
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
            };
            idle.push((process, info.start_ns, generation.since_ns));
        }
        idle
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
