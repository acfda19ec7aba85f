//! Descriptions of processes for profiles, recorded while the processes ran.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use heapbpf_audit::{Hook, Missing};
use heapbpf_heap::live::Heap;
use heapbpf_host::Host;
use heapbpf_host::process::ProcessInfo;
use heapbpf_profile::model::{Placement, Process};
use sampler_ebpf::abi::ProcessKey;

use crate::attaching::audit::Audit;
use crate::attaching::probes::Attaching;
use crate::attaching::targets::ObservedShare;
use crate::intake::losses::Exact;
use crate::intake::recorder::Recorder;

/// Description of one process, taken while it ran. There may be many, so the parts that processes have in common are
/// shared, and the rest is stored in one table instead of many small heap blocks.
#[derive(Clone, Debug, Default)]
struct Described {
    program: Arc<Program>,
    namespace_pid: Option<u32>,
    audit: Arc<Audit>,
    /// How it is hooked, if any of it is.
    hook: Option<Hook>,
    /// Why it is not hooked inline, if it should be.
    not_inline: Option<Arc<str>>,
    /// If it has probes, whether links serve it alone.
    own_links: Option<bool>,
    /// Share of its CPU time in which its calls were counted, if it has ended.
    cpu_share: Option<f64>,
    /// Whether tracking its frees was stopped.
    without_frees: bool,
    /// How much was seen of it, set when it exits.
    ended: Option<ObservedShare>,
}

/// The program that a process runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Program {
    comm: Arc<str>,
    exe: Arc<str>,
    cgroup: Arc<str>,
    placement: Arc<Placement>,
}

/// Programs and audits shared between descriptions.
#[derive(Default)]
struct Shared {
    programs: HashSet<Arc<Program>>,
    sweep_at: usize,
    /// Audits of the most recently described processes: new processes mostly run the same programs.
    audits: VecDeque<Arc<Audit>>,
}

/// Number of programs below which unused ones are not swept.
const FIRST_SWEEP: usize = 1024;
/// Number of recent audits that a new one is compared with.
const RECENT_AUDITS: usize = 16;

impl Shared {
    fn program(&mut self, info: &ProcessInfo) -> Arc<Program> {
        let [comm, exe, cgroup] = [&info.comm, &info.exe, &info.cgroup].map(Arc::clone);
        let program = Program { comm, exe, cgroup, placement: Arc::clone(&info.placement) };
        if let Some(known) = self.programs.get(&program) {
            return Arc::clone(known);
        }
        if self.programs.len() >= self.sweep_at.max(FIRST_SWEEP) {
            self.programs.retain(|program| Arc::strong_count(program) > 1);
            self.sweep_at = 2 * self.programs.len();
        }
        let program = Arc::new(program);
        self.programs.insert(Arc::clone(&program));
        program
    }

    fn audit(&mut self, audit: Audit) -> Arc<Audit> {
        if let Some(known) = self.audits.iter().find(|known| ***known == audit) {
            return Arc::clone(known);
        }
        if self.audits.len() >= RECENT_AUDITS {
            self.audits.pop_front();
        }
        let audit = Arc::new(audit);
        self.audits.push_back(Arc::clone(&audit));
        audit
    }
}

/// The line that exited processes without samples share when there are too many of them.
pub const SHARED_LINE: ProcessKey = ProcessKey { start_ns: 0, tgid: 0, exec_id: 0 };

/// Descriptions of processes.
#[derive(Default)]
pub struct Descriptions {
    described: HashMap<ProcessKey, Described>,
    shared: Shared,
    /// Number of the recorder's processes that have been described.
    noted: usize,
}

impl Descriptions {
    /// Describes processes that are seen for the first time, while they still run. Returns whether there were any.
    pub fn note_new(&mut self, recorder: &Recorder, host: &mut Host, attaching: &Attaching) -> bool {
        if recorder.processes.len() == self.noted {
            return false;
        }
        self.noted = recorder.processes.len();
        for (process, time_ns) in &recorder.processes {
            if !self.described.contains_key(process) {
                if let Some(generation) = host.processes().at(process.tgid, *time_ns).map(|generation| generation.id) {
                    host.processes_mut().note_sampled(generation);
                }
                let described = describe(*process, *time_ns, host, attaching, &mut self.shared);
                self.described.insert(*process, described);
            }
        }
        true
    }

    /// Describes a process generation that ends, from its state at that time.
    pub fn note(&mut self, process: ProcessKey, time_ns: u64, host: &mut Host, attaching: &Attaching) {
        let shared = &mut self.shared;
        let described = self.described.entry(process);
        let described = described.or_insert_with(|| describe(process, time_ns, host, attaching, shared));
        described.refresh(process, time_ns, host, attaching, shared);
    }

    /// Running processes for which tracking frees was stopped, but whose memory in use the heap still counts as known.
    pub fn without_frees(&mut self, heap: &Heap, host: &Host, attaching: &Attaching) -> Vec<ProcessKey> {
        let mut found = Vec::new();
        let living = self.described.iter_mut().filter(|(_, described)| described.ended.is_none());
        for (process, described) in living.filter(|(process, _)| !heap.is_untracked(process)) {
            let generation = host.processes().current(process.tgid).filter(|_| attaching.is_current_program(*process));
            described.without_frees |=
                generation.is_some_and(|generation| attaching.stopped_tracking_frees_of(generation));
            if described.without_frees {
                found.push(*process);
            }
        }
        found
    }

    /// Running processes whose frees are tracked again although the heap does not know it yet, and since when
    /// (CLOCK_MONOTONIC).
    pub fn with_frees_again(&mut self, heap: &Heap, host: &Host, attaching: &Attaching) -> Vec<(ProcessKey, u64)> {
        let again = |(process, described): (&ProcessKey, &mut Described)| {
            let generation = host.processes().current(process.tgid).filter(|_| attaching.is_current_program(*process));
            let generation = generation.filter(|it| !attaching.stopped_tracking_frees_of(it))?;
            let since_ns = attaching.frees_tracked_since(generation)?;
            (Some(since_ns) > heap.tracked_since(process)).then(|| {
                described.without_frees = false;
                (*process, since_ns)
            })
        };
        let living = self.described.iter_mut().filter(|(_, described)| described.ended.is_none());
        living.filter_map(again).collect()
    }

    /// Marks a process as exited, with how much was seen of it, and the share of its CPU time in which its calls were
    /// counted.
    pub fn ended(&mut self, process: ProcessKey, seen: ObservedShare, cpu_share: Option<f64>) {
        if let Some(described) = self.described.get_mut(&process) {
            described.ended = Some(seen);
            described.cpu_share = cpu_share;
        }
    }

    /// Replaces a process's own line by [`SHARED_LINE`].
    pub fn share_line(&mut self, process: ProcessKey) {
        self.described.remove(&process);
        self.described.entry(SHARED_LINE).or_insert_with(|| {
            let program = Program { comm: "(ended, without samples)".into(), ..Program::default() };
            Described { program: Arc::new(program), ended: Some(ObservedShare::WHOLE), ..Described::default() }
        });
    }

    /// The name of a process; empty if it is unknown.
    pub fn comm(&self, process: ProcessKey) -> Arc<str> {
        self.described.get(&process).map_or_else(|| "".into(), |described| Arc::clone(&described.program.comm))
    }

    /// Forgets an exited process without figures: it gets no line.
    pub fn forget_one(&mut self, process: ProcessKey) {
        self.described.remove(&process);
    }

    /// Releases the memory that exited processes took up.
    pub fn shrink(&mut self) {
        self.described.shrink_to_fit();
    }

    /// Drops the descriptions of processes whose figures have been moved to the overflow bucket.
    pub fn forget(&mut self, processes: &HashSet<ProcessKey>, recorder: &Recorder) {
        self.described.retain(|process, _| !processes.contains(process));
        self.noted = recorder.processes.len().min(self.noted);
    }

    /// The entry of a process in a profile.
    pub fn process(
        &mut self,
        key: ProcessKey,
        now_ns: u64,
        host: &mut Host,
        attaching: &Attaching,
        exact: Option<Exact>,
    ) -> Process {
        let shared = &mut self.shared;
        let described = self.described.entry(key).or_insert_with(|| describe(key, now_ns, host, attaching, shared));
        if described.ended.is_none() || described.audit.allocators.is_empty() {
            described.refresh(key, now_ns, host, attaching, shared);
        }
        let seen = described.ended.unwrap_or_else(|| attaching.targets.seen(key.tgid, now_ns));
        // Allocations that a process does not announce are not counted, nor are those under the hooks of another
        // heapbpf. Calls that may be an allocator's own mappings would count twice.
        let (hidden, sorts) = (seen.was_hidden, attaching.sorts_mappings());
        let exact = exact.filter(|_| described.hook != Some(Hook::Usdt) && !hidden && !sorts);
        let is_distrusted = attaching.inline.as_ref().is_some_and(|inline| inline.counted.distrusted.contains(&key));
        let own = hidden.then(Missing::unseen).into_iter().chain(is_distrusted.then(Missing::own_counts));
        let own = own.chain(sorts.then(Missing::exact_mappings));
        Process {
            pid: key.tgid,
            namespace_pid: described.namespace_pid,
            comm: described.program.comm.to_string(),
            exe: described.program.exe.to_string(),
            cgroup: described.program.cgroup.to_string(),
            placement: described.program.placement.as_ref().clone(),
            allocators: described.audit.allocators.clone(),
            hook: described.hook,
            not_inline: described.not_inline.as_deref().map(str::to_owned),
            own_links: described.own_links,
            audit: described.audit.files.clone(),
            missing: own.chain(described.audit.missing.iter().cloned()).collect(),
            coverage: seen.share,
            // What is known by process id may be that of another process by now.
            cpu_coverage: described.cpu_share.or_else(|| attaching.cpu_share(key)),
            ended: described.ended.is_some(),
            inuse_unknown: described.without_frees,
            exact_alloc_bytes: exact.map(|exact| exact.bytes),
            exact_alloc_objects: exact.map(|exact| exact.objects),
            ..Process::default()
        }
    }
}

impl Described {
    /// Notes how it is hooked now.
    fn look_at_hook(&mut self, process: ProcessKey, audit: &Audit, attaching: &Attaching) {
        if audit.allocators.is_empty() || !attaching.is_current_program(process) {
            return;
        }
        self.hook = Some(attaching.standing.hook(process.tgid));
        // Where processes are hooked one by one, it may have lost its links since.
        let had_own_links = attaching.takes_in() && self.own_links == Some(true);
        let is_probed = self.hook == Some(Hook::Probe);
        self.own_links = is_probed.then(|| had_own_links || attaching.own.contains(&process.tgid));
        let why = attaching.standing.why_not(process.tgid);
        if self.not_inline.as_deref() != why {
            self.not_inline = why.map(Arc::from);
        }
    }

    /// Refreshes the audit: files may be mapped, or examined, only after the process's first sample.
    fn refresh(&mut self, process: ProcessKey, time_ns: u64, host: &Host, attaching: &Attaching, shared: &mut Shared) {
        let Some(generation) = host.processes().at(process.tgid, time_ns) else { return };
        self.without_frees |= self.ended.is_none() && attaching.stopped_tracking_frees_of(generation);
        let found = attaching.audit(generation, host.modules());
        if self.ended.is_none() {
            self.look_at_hook(process, &found, attaching);
        }
        let size = |audit: &Audit| (audit.allocators.len(), audit.files.len(), audit.missing.len());
        if size(&found) >= size(&self.audit) {
            self.audit = shared.audit(found);
        }
    }
}

fn describe(
    process: ProcessKey,
    time_ns: u64,
    host: &mut Host,
    attaching: &Attaching,
    shared: &mut Shared,
) -> Described {
    let Some(generation) = host.processes().at(process.tgid, time_ns) else { return Described::default() };
    let (id, audit) = (generation.id, shared.audit(attaching.audit(generation, host.modules())));
    let mut described = Described::default();
    described.look_at_hook(process, &audit, attaching);
    let without_frees = attaching.stopped_tracking_frees_of(generation);
    let info = host.describe(id).unwrap_or_default();
    Described { program: shared.program(&info), namespace_pid: info.namespace_pid, audit, without_frees, ..described }
}
