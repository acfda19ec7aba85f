//! From the heap to a profile: processes described, stacks named, sums put into rows.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use sampler_ebpf::abi::ProcessKey;

use super::accounting;
use super::attaching::Attaching;
use super::naming::{Naming, Unnamed};
use super::recorder::Recorder;
use crate::cli::plan::RecordPlan;
use crate::heap::live::Snapshot;
use crate::host::Host;
use crate::host::events::monotonic_ns;
use crate::host::process::ProcessInfo;
use crate::kernel::totals::Counts;
use crate::profile::model::{Lifetimes, Process, Profile, Row};
use crate::sampling::survival::{self, Observation};

/// What is remembered of a process for the profile, from the time when it lived.
#[derive(Clone, Debug, Default)]
struct Described {
    info: Option<Arc<ProcessInfo>>,
    allocators: Vec<String>,
    /// Its coverage, once it has ended.
    ended: Option<f64>,
}

/// The line that ended processes without samples share when there are too many of them.
pub const SHARED_LINE: ProcessKey = ProcessKey { start_ns: 0, tgid: 0, exec_id: 0 };

/// Makes profiles.
pub struct ProfileMaker {
    template: Profile,
    naming: Naming,
    described: HashMap<ProcessKey, Described>,
    /// Processes of the recorder that were described.
    noted: usize,
}

impl ProfileMaker {
    /// For one recording.
    pub fn new(plan: &RecordPlan) -> Self {
        let template = Profile {
            version: env!("CARGO_PKG_VERSION").into(),
            interval: plan.interval,
            criterion: plan.criterion,
            unwind: plan.unwind.name().into(),
            started: SystemTime::UNIX_EPOCH,
            duration: Duration::ZERO,
            live: plan.live,
            samples_known: true,
            host: host_name(),
            processes: Vec::new(),
            rows: Vec::new(),
            modules: Vec::new(),
            counters: Default::default(),
            notes: Vec::new(),
        };
        Self {
            template,
            naming: Naming::new(plan.symbolize, plan.symbols.clone()),
            described: HashMap::new(),
            noted: 0,
        }
    }

    /// Describes processes seen for the first time, while they are there to be looked at.
    pub fn note_processes(&mut self, recorder: &Recorder, host: &mut Host, attaching: &Attaching) {
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
            Described { info: Some(Arc::new(info)), allocators: Vec::new(), ended: Some(1.0) }
        });
    }

    /// The profile of this moment.
    pub fn make(
        &mut self,
        recorder: &mut Recorder,
        host: &mut Host,
        attaching: &Attaching,
        counts: &Counts,
        started: (SystemTime, u64),
    ) -> Profile {
        let now = monotonic_ns();
        let snapshots = recorder.heap.snapshot(now);
        let mut keys: Vec<ProcessKey> =
            counts.processes.iter().filter(|(_, counters)| counters.hits() > 0).map(|(process, _)| *process).collect();
        keys.extend(snapshots.iter().map(|snapshot| snapshot.row.process));
        keys.sort_unstable_by_key(|key| (key.tgid, key.start_ns, key.exec_id));
        keys.dedup();
        let numbers: HashMap<ProcessKey, usize> = keys.iter().enumerate().map(|(i, key)| (*key, i)).collect();
        let processes = keys.iter().map(|key| self.process(*key, now, host, attaching, counts)).collect();

        let mut profile = self.template.clone();
        profile.started = started.0;
        profile.duration = Duration::from_nanos(now.saturating_sub(started.1));
        profile.processes = processes;
        let mut function_names: HashMap<u16, Arc<str>> = HashMap::new();
        let unnamed: Vec<Unnamed> = snapshots
            .iter()
            .map(|snapshot| Unnamed {
                process: snapshot.row.process,
                time_ns: snapshot.row.first_ns,
                stack: Arc::clone(&snapshot.row.stack),
            })
            .collect();
        self.naming.name(&unnamed, host);
        for snapshot in snapshots {
            let row = snapshot.row;
            let function = function_names
                .entry(row.function)
                .or_insert_with(|| attaching.hooks.function_name(row.function).into());
            profile.rows.push(Row {
                process: numbers[&row.process],
                thread: Arc::clone(&row.thread),
                function: Arc::clone(function),
                interval: row.interval,
                alloc: row.alloc,
                inuse: snapshot.inuse,
                peak: self.template.live.then_some(snapshot.peak),
                lifetimes: self.template.live.then(|| lifetimes(&snapshot)).flatten(),
                stack: self.naming.stack(&row.stack),
            });
        }
        profile.modules = self.naming.modules().to_vec();
        profile
    }

    fn process(
        &mut self,
        key: ProcessKey,
        now: u64,
        host: &mut Host,
        attaching: &Attaching,
        counts: &Counts,
    ) -> Process {
        let described = self.described.entry(key).or_insert_with(|| describe(key, now, host, attaching));
        if described.ended.is_none() || described.allocators.is_empty() {
            described.refresh(key, now, host, attaching);
        }
        let counters = counts.processes.get(&key);
        let info = described.info.as_deref().cloned().unwrap_or_default();
        Process {
            pid: key.tgid,
            namespace_pid: info.namespace_pid,
            comm: info.comm.to_string(),
            exe: info.exe.to_string(),
            cgroup: info.cgroup.to_string(),
            allocators: described.allocators.clone(),
            coverage: described.ended.unwrap_or_else(|| attaching.targets.coverage(key.tgid, now)),
            ended: described.ended.is_some(),
            exact_alloc_bytes: counters.map(accounting::exact_bytes),
            exact_alloc_objects: counters.map(accounting::exact_objects),
        }
    }
}

impl Described {
    /// Its files may be mapped, or looked at, only after its first sample.
    fn refresh(&mut self, process: ProcessKey, time_ns: u64, host: &Host, attaching: &Attaching) {
        let allocators = host.lives().at(process.tgid, time_ns).map(|life| attaching.allocators(life));
        if let Some(allocators) = allocators.filter(|found| found.len() > self.allocators.len()) {
            self.allocators = allocators;
        }
    }
}

fn describe(process: ProcessKey, time_ns: u64, host: &mut Host, attaching: &Attaching) -> Described {
    let Some(life) = host.lives().at(process.tgid, time_ns) else { return Described::default() };
    let (id, allocators) = (life.id, attaching.allocators(life));
    Described { info: host.describe(id), allocators, ended: None }
}

/// Steps of a survival curve that a profile keeps.
const CURVE_POINTS: usize = 32;

fn lifetimes(snapshot: &Snapshot<'_>) -> Option<Lifetimes> {
    let ages = &snapshot.row.ages;
    let freed = ages.weights().map(|(age_seconds, weight)| (age_seconds, weight, true));
    let living = snapshot.living.iter().map(|(age_seconds, weight)| (*age_seconds, *weight, false));
    let observations: Vec<Observation> = freed
        .chain(living)
        .map(|(age_seconds, weight, freed)| Observation { age_seconds, weight, freed, temporary: false })
        .collect();
    let all: f64 = observations.iter().map(|observation| observation.weight).sum();
    let lifetimes = survival::lifetimes(&observations, CURVE_POINTS)?;
    // Which of the blocks in a bin were temporary is not kept, only their weight.
    Some(Lifetimes { temporary: if all > 0.0 { ages.temporary() / all } else { 0.0 }, ..lifetimes })
}

fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").map(|name| name.trim().to_owned()).unwrap_or_default()
}
