//! From snapshots to profiles, in a thread of its own: stacks are named, lifetimes are estimated, ended processes are
//! put with the residue. The event path hands over and goes on.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant, SystemTime};

use sampler_ebpf::abi::ProcessKey;

use super::accounting;
use super::naming::Naming;
use super::own_code::OwnCode;
use super::residue::Residue;
use super::snapshot::{Detail, Retired, Snapshot, SnapshotRow};
use crate::cli::plan::RecordPlan;
use crate::heap::ages::Ages;
use crate::heap::sums::SampleSums;
use crate::host::own_memory::give_memory_back;
use crate::profile::adjust::Adjustments;
use crate::profile::model::{Lifetimes, Process, Profile, Row};
use crate::profile::stats::Stats;
use crate::sampling::survival::{self, Observation};
use crate::symbols::progress::Progress;
use crate::unwind::raw::RawStack;

/// A profile, and what goes with it.
pub struct Made {
    /// The profile.
    pub profile: Profile,
    /// The accounting of the same moment.
    pub stats: Stats,
    /// Which life each process of the profile is; shorter than its list by those of the residue.
    pub keys: Vec<ProcessKey>,
    /// When the event path began to take the snapshot.
    pub begun: Instant,
    /// How long it stood still for it.
    pub cost: Duration,
}

/// What becomes of a profile.
type Then = Box<dyn FnOnce(Made) + Send>;

enum Job {
    Make(Box<Snapshot>, Then),
    Retire(Box<Retired>),
    OwnCode(ProcessKey, OwnCode),
    Tidy(Vec<Arc<RawStack>>),
}

/// The thread that makes profiles. It ends when this is dropped, after what it was given.
pub struct Maker {
    jobs: Sender<Job>,
    progress: Arc<Progress>,
}

impl Maker {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(plan: &RecordPlan) -> std::io::Result<Self> {
        let (jobs, queue) = channel();
        let template = template(plan);
        let (symbolize, symbols, adjustments) = (plan.symbolize, plan.symbols.clone(), plan.adjustments);
        let progress = Arc::new(Progress::default());
        let told = Arc::clone(&progress);
        std::thread::Builder::new().name("profiles".into()).spawn(move || {
            let naming = Naming::new(symbolize, symbols, told);
            Worker { template, adjustments, naming, residue: Residue::default() }.work(&queue);
        })?;
        Ok(Self { jobs, progress })
    }

    /// Places that have been named for the profile at work, and all that are to be.
    pub fn progress(&self) -> (usize, usize) {
        self.progress.get()
    }

    /// Has a profile made; `then` runs in the maker's thread. It is dropped without being called if that thread died.
    pub fn make(&self, snapshot: Snapshot, then: impl FnOnce(Made) + Send + 'static) {
        let _ = self.jobs.send(Job::Make(Box::new(snapshot), Box::new(then)));
    }

    /// Makes sure of the names of a process's own code while it runs.
    pub fn open_own_code(&self, process: ProcessKey, own: OwnCode) {
        let _ = self.jobs.send(Job::OwnCode(process, own));
    }

    /// Puts ended processes with the residue.
    pub fn retire(&self, retired: Retired) {
        let _ = self.jobs.send(Job::Retire(Box::new(retired)));
    }

    /// Forgets the names of all stacks but these, and gives back to the system what the process does not need: here, as
    /// that takes milliseconds.
    pub fn tidy(&self, living: Vec<Arc<RawStack>>) {
        let _ = self.jobs.send(Job::Tidy(living));
    }
}

struct Worker {
    template: Profile,
    adjustments: Adjustments,
    naming: Naming,
    residue: Residue,
}

impl Worker {
    fn work(mut self, queue: &Receiver<Job>) {
        while let Ok(job) = queue.recv() {
            match job {
                Job::Make(snapshot, then) => then(self.make(*snapshot)),
                Job::Retire(retired) => self.retire(*retired),
                Job::OwnCode(process, own) => self.naming.open_own_code(process, own),
                Job::Tidy(living) => {
                    self.naming.keep_only(living.iter());
                    drop(living);
                    give_memory_back();
                }
            }
        }
    }

    fn make(&mut self, snapshot: Snapshot) -> Made {
        let stacks = || snapshot.rows.iter().filter_map(|row| row.stack.as_ref());
        if snapshot.detail != Detail::Totals {
            self.naming.name(stacks(), snapshot.facts);
            // Every living row is in such a snapshot.
            self.naming.keep_only(stacks().map(|unnamed| &unnamed.stack));
        }
        // After the names were found: that costs, too.
        let cost = accounting::daemon_cost();
        let stats = Stats {
            daemon_cpu_seconds: cost.cpu_seconds,
            daemon_peak_rss_bytes: cost.peak_rss_bytes,
            ..snapshot.stats
        };
        let mut profile = self.template.clone();
        profile.time_windows = snapshot.time_windows;
        profile.started = snapshot.started;
        profile.duration = snapshot.duration;
        profile.unread = snapshot.unread;
        profile.time = snapshot.started + snapshot.duration;
        profile.counters = stats.counters();
        profile.notes = snapshot.notes;
        profile.processes = snapshot.processes;
        let first = profile.processes.len();
        profile.processes.extend_from_slice(self.residue.processes());
        let known = |process: &Process| !process.inuse_unknown;
        profile.live = snapshot.live;
        profile.live = profile.knows_some_inuse();
        let is_known = |row: &SnapshotRow| profile.live && profile.processes.get(row.process).is_none_or(known);
        profile.rows = snapshot.rows.into_iter().map(|row| self.row(is_known(&row), row)).collect();
        if snapshot.detail == Detail::Totals {
            profile.rows.extend(self.residue.totals(first, profile.live));
        } else {
            profile.rows.extend(self.residue.rows(first, profile.live));
        }
        profile.keep_loss_intervals();
        profile.modules = self.naming.modules().to_vec();
        profile.notes.extend(accounting::broken_chains(&profile));
        if let Err(error) = self.adjustments.apply(&mut profile) {
            profile.notes.push(error.to_string());
        }
        Made { profile, stats, keys: snapshot.keys, begun: snapshot.begun, cost: snapshot.cost }
    }

    /// `known`: what its process has in use is, and how long its blocks live.
    fn row(&self, known: bool, row: SnapshotRow) -> Row {
        let live = self.template.live && known;
        Row {
            process: row.process,
            thread: row.thread,
            function: row.function,
            interval: row.interval,
            alloc: row.alloc,
            inuse: if known { row.inuse } else { SampleSums::default() },
            at_exit: if known { row.at_exit } else { SampleSums::default() },
            peak: live.then_some(row.peak),
            lifetimes: row.ages.filter(|_| live).and_then(|(ages, living)| lifetimes(&ages, &living)),
            stack: row.stack.map_or_else(Arc::default, |unnamed| self.naming.stack(&unnamed.stack)),
        }
    }

    fn retire(&mut self, retired: Retired) {
        self.naming.name(retired.rows.iter().filter_map(|row| row.stack.as_ref()), retired.facts);
        let programs: Vec<usize> = retired.processes.iter().map(|process| self.residue.program(process)).collect();
        for (program, process) in programs.iter().zip(&retired.processes) {
            self.residue.add_counts(*program, process);
        }
        for row in retired.rows {
            let program = programs[row.process];
            let known = !retired.processes[row.process].inuse_unknown;
            let row = self.row(known, row);
            self.residue.add_row(program, &row);
        }
        self.naming.forget_processes(&retired.keys);
    }
}

fn template(plan: &RecordPlan) -> Profile {
    Profile {
        version: env!("CARGO_PKG_VERSION").into(),
        interval: plan.interval,
        criterion: plan.criterion,
        unwind: plan.unwind.name().into(),
        started: SystemTime::UNIX_EPOCH,
        time: SystemTime::UNIX_EPOCH,
        unread: None,
        duration: Duration::ZERO,
        live: plan.live,
        samples_known: true,
        offsets_known: true,
        ended_apart: plan.ended_apart(),
        recordings: 1,
        estimator: Default::default(),
        time_windows: false,
        host: host_name(),
        processes: Vec::new(),
        rows: Vec::new(),
        modules: Vec::new(),
        counters: Default::default(),
        notes: Vec::new(),
    }
}

/// Steps of a survival curve that a profile keeps.
const CURVE_POINTS: usize = 32;

fn lifetimes(ages: &Ages, living: &[(f64, f64)]) -> Option<Lifetimes> {
    let freed = ages.weights().map(|(age_seconds, weight)| (age_seconds, weight, true));
    let living = living.iter().map(|(age_seconds, weight)| (*age_seconds, *weight, false));
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

#[cfg(test)]
#[path = "maker_tests.rs"]
mod tests;
