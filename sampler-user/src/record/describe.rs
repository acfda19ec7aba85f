//! What is remembered of processes for profiles, from the time when they lived.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use sampler_ebpf::abi::ProcessKey;

use super::accounting;
use super::attaching::{Attaching, Audit};
use super::recorder::Recorder;
use crate::host::Host;
use crate::host::process::ProcessInfo;
use crate::kernel::totals::Counts;
use crate::profile::model::Process;

/// A process while it could be looked at.
#[derive(Clone, Debug, Default)]
struct Described {
    info: Option<Arc<ProcessInfo>>,
    audit: Audit,
    /// Its coverage, once it has ended.
    ended: Option<f64>,
}

/// The line that ended processes without samples share when there are too many of them.
pub const SHARED_LINE: ProcessKey = ProcessKey { start_ns: 0, tgid: 0, exec_id: 0 };

/// Descriptions of processes.
#[derive(Default)]
pub struct Descriptions {
    described: HashMap<ProcessKey, Described>,
    /// Processes of the recorder that were described.
    noted: usize,
}

impl Descriptions {
    /// Describes processes seen for the first time, while they are there to be looked at.
    pub fn note_new(&mut self, recorder: &Recorder, host: &mut Host, attaching: &Attaching) {
        if recorder.processes.len() == self.noted {
            return;
        }
        self.noted = recorder.processes.len();
        for (process, time_ns) in &recorder.processes {
            if !self.described.contains_key(process) {
                let described = describe(*process, *time_ns, host, attaching);
                self.described.insert(*process, described);
            }
        }
    }

    /// Describes a process whose life ends, by what is known of it at that time.
    pub fn note(&mut self, process: ProcessKey, time_ns: u64, host: &mut Host, attaching: &Attaching) {
        let described = self.described.entry(process).or_insert_with(|| describe(process, time_ns, host, attaching));
        described.refresh(process, time_ns, host, attaching);
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
            let info = ProcessInfo { comm: "(ended, without samples)".into(), ..ProcessInfo::default() };
            Described { info: Some(Arc::new(info)), audit: Audit::default(), ended: Some(1.0) }
        });
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
        counts: &Counts,
    ) -> Process {
        let described = self.described.entry(key).or_insert_with(|| describe(key, now_ns, host, attaching));
        if described.ended.is_none() || described.audit.allocators.is_empty() {
            described.refresh(key, now_ns, host, attaching);
        }
        let counters = counts.processes.get(&key);
        let info = described.info.as_deref().cloned().unwrap_or_default();
        Process {
            pid: key.tgid,
            namespace_pid: info.namespace_pid,
            comm: info.comm.to_string(),
            exe: info.exe.to_string(),
            cgroup: info.cgroup.to_string(),
            allocators: described.audit.allocators.clone(),
            audit: described.audit.files.clone(),
            missing: described.audit.missing.clone(),
            coverage: described.ended.unwrap_or_else(|| attaching.targets.coverage(key.tgid, now_ns)),
            ended: described.ended.is_some(),
            exact_alloc_bytes: counters.map(accounting::exact_bytes),
            exact_alloc_objects: counters.map(accounting::exact_objects),
        }
    }
}

impl Described {
    /// Its files may be mapped, or looked at, only after its first sample.
    fn refresh(&mut self, process: ProcessKey, time_ns: u64, host: &Host, attaching: &Attaching) {
        let Some(life) = host.lives().at(process.tgid, time_ns) else { return };
        let found = attaching.audit(life);
        let size = |audit: &Audit| (audit.allocators.len(), audit.files.len(), audit.missing.len());
        if size(&found) >= size(&self.audit) {
            self.audit = found;
        }
    }
}

fn describe(process: ProcessKey, time_ns: u64, host: &mut Host, attaching: &Attaching) -> Described {
    let Some(life) = host.lives().at(process.tgid, time_ns) else { return Described::default() };
    let (id, audit) = (life.id, attaching.audit(life));
    Described { info: host.describe(id), audit, ended: None }
}
