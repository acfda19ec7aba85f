//! What is taken out of a running recording in one go, cheaply, so that naming, encoding and serving it need not wait
//! for the event path nor keep it waiting: sums are copied, stacks and files are shared.

use std::collections::{HashMap, HashSet};
use std::ops::Add;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use sampler_ebpf::abi::ProcessKey;

use super::attaching::Attaching;
use super::describe::Descriptions;
use super::ended::{EndedCounts, Exact};
use super::losses::LossLedger;
use super::naming::{Facts, ModuleFacts};
use super::own_code::OwnCode;
use super::recorder::Recorder;
use crate::heap::ages::Ages;
use crate::heap::live::{HeapRow, LostBlocks};
use crate::heap::sums::SampleSums;
use crate::host::Host;
use crate::host::events::{monotonic_ns, suspended_ns};
use crate::host::mappings::ModuleId;
use crate::kernel::totals::Counts;
use crate::profile::model::{LossBound, Losses, Process, Unread};
use crate::profile::stats::Stats;
use crate::unwind::image::ModuleFiles;
use crate::unwind::raw::RawStack;

/// How much of the heap a snapshot carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// Sums of each process and interval: one row without a stack.
    Totals,
    /// Every stack.
    Stacks,
    /// Every stack, with lifetimes of blocks.
    Lifetimes,
}

/// A recording at one moment.
pub struct Snapshot {
    /// How much it carries.
    pub detail: Detail,
    /// Whether blocks in use are known: not if frees are no longer looked at.
    pub live: bool,
    /// Whether probes were in place in time windows only.
    pub time_windows: bool,
    /// Wall clock at the recording's start.
    pub started: SystemTime,
    /// Length of the recording so far.
    pub duration: Duration,
    /// Records of before this moment that were not read in time.
    pub unread: Option<Unread>,
    /// Which life each process is, in the order of `processes`.
    pub keys: Vec<ProcessKey>,
    /// Processes with at least one hit.
    pub processes: Vec<Process>,
    /// Sums.
    pub rows: Vec<SnapshotRow>,
    /// What naming needs to know of stacks that it has not seen.
    pub facts: Facts,
    /// The accounting.
    pub stats: Stats,
    /// What the user must know beside the figures.
    pub notes: Vec<String>,
    /// When it was begun.
    pub begun: Instant,
    /// How long the event path stood still for it.
    pub cost: Duration,
}

/// Sums of one row of the heap.
pub struct SnapshotRow {
    /// Index into [`Snapshot::processes`].
    pub process: usize,
    /// Thread name.
    pub thread: Arc<str>,
    /// Allocator function.
    pub function: Arc<str>,
    /// Interval of these samples.
    pub interval: u64,
    /// All samples.
    pub alloc: SampleSums,
    /// Those in use.
    pub inuse: SampleSums,
    /// Those in use when their process ended, where that stands apart from what is in use.
    pub at_exit: SampleSums,
    /// Those in use at the peak.
    pub peak: SampleSums,
    /// Ages of freed blocks, and (seconds, weight) of those that live, if asked for.
    pub ages: Option<(Ages, Vec<(f64, f64)>)>,
    /// Stack; `None` for totals.
    pub stack: Option<Unnamed>,
}

/// A stack to be named, and whose it is.
#[derive(Clone)]
pub struct Unnamed {
    /// Process.
    pub process: ProcessKey,
    /// The stack.
    pub stack: Arc<RawStack>,
}

/// Processes that have ended, with all that was allocated in them: they leave the recording for the residue.
pub struct Retired {
    /// Which life each process was, in the order of `processes`.
    pub keys: Vec<ProcessKey>,
    /// The processes.
    pub processes: Vec<Process>,
    /// Their rows.
    pub rows: Vec<SnapshotRow>,
    /// What naming needs to know.
    pub facts: Facts,
}

/// The parts of a session that snapshots are taken of.
pub struct Parts<'a> {
    /// Sums.
    pub recorder: &'a mut Recorder,
    /// Processes and modules.
    pub host: &'a mut Host,
    /// Probes.
    pub attaching: &'a Attaching,
    /// Processes as they were.
    pub descriptions: &'a mut Descriptions,
    /// Exact counts that are still in the kernel.
    pub counts: &'a Counts,
    /// What may be in these that came after the moment.
    pub slack: &'a HashMap<ProcessKey, LostBlocks>,
    /// What may have been in use at the moment and no record tells of.
    pub unseen: &'a HashMap<ProcessKey, LostBlocks>,
    /// What lost records may have done.
    pub ledger: &'a LossLedger,
    /// Those of ended processes.
    pub ended: &'a EndedCounts,
}

/// Rows and processes of a snapshot, before the rest is known.
pub struct Content {
    /// Lives.
    pub keys: Vec<ProcessKey>,
    /// Processes.
    pub processes: Vec<Process>,
    /// Rows.
    pub rows: Vec<SnapshotRow>,
    /// Facts.
    pub facts: Facts,
}

impl Parts<'_> {
    /// Copies the sums of the whole heap as they are at `now` (CLOCK_MONOTONIC).
    pub fn take(&mut self, detail: Detail, now: u64) -> Content {
        let mut keys: Vec<ProcessKey> = self
            .counts
            .processes
            .iter()
            .filter(|(_, counters)| counters.hits() > 0)
            .map(|(process, _)| *process)
            .chain(self.ended.processes().copied())
            .collect();
        let mut rows = Vec::new();
        let mut names = FunctionNames::default();
        let mut gather = Gather::default();
        let mut totals: HashMap<(ProcessKey, u64), usize> = HashMap::new();
        let mut of_row = Vec::new();
        for snapshot in self.recorder.heap.snapshot(now, detail == Detail::Lifetimes) {
            let row = snapshot.row;
            if detail == Detail::Totals {
                let number = *totals.entry((row.process, row.interval)).or_insert_with(|| {
                    of_row.push(row.process);
                    rows.push(total_row(row.interval));
                    rows.len() - 1
                });
                let total: &mut SnapshotRow = &mut rows[number];
                total.alloc.add(&row.alloc);
                total.inuse.add(&snapshot.inuse);
                total.at_exit.add(&snapshot.at_exit);
                continue;
            }
            if !row.named {
                gather.row(row, self.host);
            }
            of_row.push(row.process);
            rows.push(SnapshotRow {
                inuse: snapshot.inuse,
                at_exit: snapshot.at_exit,
                ages: (detail == Detail::Lifetimes).then(|| (row.ages.clone(), snapshot.living)),
                ..copy_of(row, names.get(row.function, self.attaching))
            });
        }
        if detail != Detail::Totals {
            self.recorder.heap.mark_named();
        }
        keys.extend(&of_row);
        keys.sort_unstable_by_key(|key| (key.tgid, key.start_ns, key.exec_id));
        keys.dedup();
        self.finish(keys, rows, &of_row, gather, now)
    }

    /// Takes the rows of ended processes out of the heap. Returns who could not be taken out yet, too.
    pub fn retire(&mut self, ended: &HashSet<ProcessKey>) -> (Retired, HashSet<ProcessKey>) {
        let (taken, held) = self.recorder.heap.retire(ended);
        let mut names = FunctionNames::default();
        let mut gather = Gather::default();
        let mut of_row = Vec::new();
        let mut rows = Vec::new();
        for row in &taken {
            gather.row(row, self.host);
            of_row.push(row.process);
            rows.push(copy_of(row, names.get(row.function, self.attaching)));
        }
        let counted = |process: &&ProcessKey| self.ended.get(process).is_some();
        let mut keys: Vec<ProcessKey> = ended.difference(&held).filter(counted).copied().collect();
        keys.extend(&of_row);
        keys.sort_unstable_by_key(|key| (key.tgid, key.start_ns, key.exec_id));
        keys.dedup();
        let Content { keys, mut processes, rows, facts } = self.finish(keys, rows, &of_row, gather, monotonic_ns());
        for (key, process) in keys.iter().zip(&mut processes) {
            if held.contains(key) {
                // Its counts go with its last rows.
                process.exact_alloc_bytes = None;
                process.exact_alloc_objects = None;
                process.losses = Losses::default();
            }
        }
        (Retired { keys, processes, rows, facts }, held)
    }

    fn finish(
        &mut self,
        keys: Vec<ProcessKey>,
        mut rows: Vec<SnapshotRow>,
        of_row: &[ProcessKey],
        gather: Gather,
        now_ns: u64,
    ) -> Content {
        let numbers: HashMap<ProcessKey, usize> = keys.iter().enumerate().map(|(i, key)| (*key, i)).collect();
        for (row, process) in rows.iter_mut().zip(of_row) {
            row.process = numbers[process];
        }
        let heap = &self.recorder.heap;
        let processes = keys
            .iter()
            .map(|key| {
                // Its last threads may end after its other counts were taken out of the kernel.
                let counting = self.counts.processes.get(key).map(Exact::of);
                let exact = self.ended.get(key).into_iter().chain(counting).reduce(Exact::add);
                let process = self.descriptions.process(*key, now_ns, self.host, self.attaching, exact);
                let ended = self.ended.get(key).unwrap_or_default().lost;
                let slack = self.slack.get(key).copied().unwrap_or_default();
                let unseen = self.unseen.get(key).copied().unwrap_or_default();
                let mut losses = self.ledger.losses(key, self.counts.processes.get(key), ended, heap.recovered(key));
                losses.inuse_missing.add(&LossBound { samples: unseen.samples, sampled_bytes: unseen.bytes });
                Process {
                    inuse_unknown: process.inuse_unknown || heap.has_left(key),
                    losses,
                    slack: LossBound { samples: slack.samples, sampled_bytes: slack.bytes },
                    ..process
                }
            })
            .collect();
        Content { keys, processes, rows, facts: gather.finish(self.host) }
    }
}

fn total_row(interval: u64) -> SnapshotRow {
    SnapshotRow {
        process: 0,
        thread: "".into(),
        function: "".into(),
        interval,
        alloc: SampleSums::default(),
        inuse: SampleSums::default(),
        at_exit: SampleSums::default(),
        peak: SampleSums::default(),
        ages: None,
        stack: None,
    }
}

fn copy_of(row: &HeapRow, function: Arc<str>) -> SnapshotRow {
    SnapshotRow {
        process: 0,
        thread: Arc::clone(&row.thread),
        function,
        interval: row.interval,
        alloc: row.alloc,
        inuse: SampleSums::default(),
        at_exit: row.ended(),
        peak: row.peak(),
        ages: None,
        stack: Some(Unnamed { process: row.process, stack: Arc::clone(&row.stack) }),
    }
}

/// Names of allocator functions, each made once.
#[derive(Default)]
struct FunctionNames(HashMap<u16, Arc<str>>);

impl FunctionNames {
    fn get(&mut self, function: u16, attaching: &Attaching) -> Arc<str> {
        let name = self.0.entry(function).or_insert_with(|| attaching.hooks.function_name(function).into());
        Arc::clone(name)
    }
}

/// Collects what naming needs: which modules and which processes' own code stacks refer to.
#[derive(Default)]
struct Gather {
    /// Of each the first place met: process, time, address.
    modules: HashMap<ModuleId, (ProcessKey, u64, u64)>,
    own_code: HashMap<ProcessKey, u64>,
}

impl Gather {
    fn row(&mut self, row: &HeapRow, host: &Host) {
        for frame in &row.stack.frames {
            if let Some(module) = frame.module {
                self.modules.entry(module).or_insert((row.process, row.first_ns, frame.address));
            }
        }
        if row.stack.has_own_code(host.modules()) {
            self.own_code.insert(row.process, row.first_ns);
        }
    }

    fn finish(self, host: &mut Host) -> Facts {
        let mut facts = Facts::default();
        for (module, (process, time_ns, address)) in self.modules {
            let life = host.lives().at(process.tgid, time_ns);
            // As it was then: it may be unmapped by now.
            let mapping = life.and_then(|life| life.space.resolve(address, time_ns));
            let mapping = mapping.filter(|mapping| mapping.module == module);
            let (start, end, file_offset) =
                mapping.map_or((0, 0, 0), |mapping| (mapping.start, mapping.end, mapping.file_offset));
            let image = ModuleFiles::image(host.modules_mut(), module);
            let modules = host.modules();
            facts.modules.insert(
                module,
                ModuleFacts {
                    path: ModuleFiles::path(modules, module),
                    build_id: ModuleFiles::build_id(modules, module),
                    is_anonymous: ModuleFiles::is_anonymous(modules, module),
                    root: ModuleFiles::root(modules, module),
                    image,
                    start,
                    end,
                    file_offset,
                },
            );
        }
        for (process, time_ns) in self.own_code {
            facts.own_code.insert(process, own_code_of(process, time_ns, host));
        }
        facts
    }
}

/// Where the names of a process's own code are.
pub fn own_code_of(process: ProcessKey, time_ns: u64, host: &mut Host) -> OwnCode {
    let life = host.lives().at(process.tgid, time_ns).map(|life| life.id);
    let info = life.and_then(|life| host.describe(life));
    let namespace_pid = info.as_ref().and_then(|info| info.namespace_pid).unwrap_or(process.tgid);
    let age = monotonic_ns().checked_add(suspended_ns()).and_then(|now| now.checked_sub(process.start_ns));
    let started = age.and_then(|age_ns| SystemTime::now().checked_sub(Duration::from_nanos(age_ns)));
    OwnCode { pid: process.tgid, namespace_pid, owner: info.map_or(0, |info| info.uid), started }
}
