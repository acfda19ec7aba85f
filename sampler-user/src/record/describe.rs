//! What is remembered of processes for profiles, from the time when they lived.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use sampler_ebpf::abi::ProcessKey;

use super::attaching::{Attaching, Audit};
use super::ended::Exact;
use super::recorder::Recorder;
use crate::heap::live::Heap;
use crate::host::Host;
use crate::host::process::ProcessInfo;
use crate::profile::model::Process;

/// A process while it could be looked at. Many may be remembered: what they have in common is there once, and what is
/// left of each is in one table, not in small blocks between what comes and goes.
#[derive(Clone, Debug, Default)]
struct Described {
    program: Arc<Program>,
    namespace_pid: Option<u32>,
    audit: Arc<Audit>,
    /// Whether its frees were given up.
    without_frees: bool,
    /// Its coverage, once it has ended.
    ended: Option<f64>,
}

/// What a process runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Program {
    comm: Arc<str>,
    exe: Arc<str>,
    cgroup: Arc<str>,
}

/// Programs and audits that descriptions share.
#[derive(Default)]
struct Shared {
    programs: HashSet<Arc<Program>>,
    sweep_at: usize,
    /// Audits of the processes described last: most others are of the same programs.
    audits: VecDeque<Arc<Audit>>,
}

/// Programs below which unused ones are not looked for.
const FIRST_SWEEP: usize = 1024;
/// Audits that new ones are compared with.
const RECENT_AUDITS: usize = 16;

impl Shared {
    fn program(&mut self, info: &ProcessInfo) -> Arc<Program> {
        let [comm, exe, cgroup] = [&info.comm, &info.exe, &info.cgroup].map(Arc::clone);
        let program = Program { comm, exe, cgroup };
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

/// The line that ended processes without samples share when there are too many of them.
pub const SHARED_LINE: ProcessKey = ProcessKey { start_ns: 0, tgid: 0, exec_id: 0 };

/// Descriptions of processes.
#[derive(Default)]
pub struct Descriptions {
    described: HashMap<ProcessKey, Described>,
    shared: Shared,
    /// Processes of the recorder that were described.
    noted: usize,
}

impl Descriptions {
    /// Describes processes seen for the first time, while they are there to be looked at. Whether there were any.
    pub fn note_new(&mut self, recorder: &Recorder, host: &mut Host, attaching: &Attaching) -> bool {
        if recorder.processes.len() == self.noted {
            return false;
        }
        self.noted = recorder.processes.len();
        for (process, time_ns) in &recorder.processes {
            if !self.described.contains_key(process) {
                if let Some(life) = host.lives().at(process.tgid, *time_ns).map(|life| life.id) {
                    host.lives_mut().note_sampled(life);
                }
                let described = describe(*process, *time_ns, host, attaching, &mut self.shared);
                self.described.insert(*process, described);
            }
        }
        true
    }

    /// Describes a process whose life ends, by what is known of it at that time.
    pub fn note(&mut self, process: ProcessKey, time_ns: u64, host: &mut Host, attaching: &Attaching) {
        let shared = &mut self.shared;
        let described = self.described.entry(process);
        let described = described.or_insert_with(|| describe(process, time_ns, host, attaching, shared));
        described.refresh(process, time_ns, host, attaching, shared);
    }

    /// Living processes whose frees were given up and of which the heap still knows what is in use.
    pub fn without_frees(&mut self, heap: &Heap, host: &Host, attaching: &Attaching) -> Vec<ProcessKey> {
        let mut found = Vec::new();
        let living = self.described.iter_mut().filter(|(_, described)| described.ended.is_none());
        for (process, described) in living.filter(|(process, _)| !heap.has_left(process)) {
            let life = host.lives().current(process.tgid).filter(|_| attaching.is_last_life(*process));
            described.without_frees |= life.is_some_and(|life| attaching.gave_up_frees_of(life));
            if described.without_frees {
                found.push(*process);
            }
        }
        found
    }

    /// A process ended, with that coverage.
    pub fn ended(&mut self, process: ProcessKey, coverage: f64) {
        if let Some(described) = self.described.get_mut(&process) {
            described.ended = Some(coverage);
        }
    }

    /// A process has no line of its own; the shared one has.
    pub fn share_line(&mut self, process: ProcessKey) {
        self.described.remove(&process);
        self.described.entry(SHARED_LINE).or_insert_with(|| {
            let program = Program { comm: "(ended, without samples)".into(), ..Program::default() };
            Described { program: Arc::new(program), ended: Some(1.0), ..Described::default() }
        });
    }

    /// A process without figures ended: it will have no line.
    pub fn forget_one(&mut self, process: ProcessKey) {
        self.described.remove(&process);
    }

    /// Gives back the room that the ended took.
    pub fn shrink(&mut self) {
        self.described.shrink_to_fit();
    }

    /// Drops what is known of processes whose figures have been put with those of others.
    pub fn forget(&mut self, processes: &HashSet<ProcessKey>, recorder: &Recorder) {
        self.described.retain(|process, _| !processes.contains(process));
        self.noted = recorder.processes.len().min(self.noted);
    }

    /// A process as profiles show it.
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
        Process {
            pid: key.tgid,
            namespace_pid: described.namespace_pid,
            comm: described.program.comm.to_string(),
            exe: described.program.exe.to_string(),
            cgroup: described.program.cgroup.to_string(),
            allocators: described.audit.allocators.clone(),
            audit: described.audit.files.clone(),
            missing: described.audit.missing.clone(),
            coverage: described.ended.unwrap_or_else(|| attaching.targets.coverage(key.tgid, now_ns)),
            ended: described.ended.is_some(),
            inuse_unknown: described.without_frees,
            exact_alloc_bytes: exact.map(|exact| exact.bytes),
            exact_alloc_objects: exact.map(|exact| exact.objects),
            ..Process::default()
        }
    }
}

impl Described {
    /// Its files may be mapped, or looked at, only after its first sample.
    fn refresh(&mut self, process: ProcessKey, time_ns: u64, host: &Host, attaching: &Attaching, shared: &mut Shared) {
        let Some(life) = host.lives().at(process.tgid, time_ns) else { return };
        self.without_frees |= self.ended.is_none() && attaching.gave_up_frees_of(life);
        let found = attaching.audit(life);
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
    let Some(life) = host.lives().at(process.tgid, time_ns) else { return Described::default() };
    let (id, audit) = (life.id, shared.audit(attaching.audit(life)));
    let without_frees = attaching.gave_up_frees_of(life);
    let info = host.describe(id).unwrap_or_default();
    Described { program: shared.program(&info), namespace_pid: info.namespace_pid, audit, without_frees, ended: None }
}
