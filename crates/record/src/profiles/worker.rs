//! The profile workers: threads that turn snapshots into profiles. One symbolizes stacks, estimates lifetimes and moves
//! exited processes to the overflow bucket. The other makes totals, which need no names and do not wait for any. The
//! event path hands over its snapshots and does not wait.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use heapbpf_heap::ages::Ages;
use heapbpf_host::clock::thread_cpu_time;
use heapbpf_host::own_memory::give_memory_back;
use heapbpf_host::privileges::restrict_worker;
use heapbpf_profile::adjust::Adjustments;
use heapbpf_profile::lost_samples;
use heapbpf_profile::model::{Header, Lifetimes, Process, Profile, Row, Stack};
use heapbpf_statistics::sums::SampleSums;
use heapbpf_statistics::survival::{self, Observation};
use heapbpf_symbols::demangle::Demangler;
use heapbpf_symbols::progress::{Download, Progress};
use heapbpf_symbols::runtime_functions::RuntimeFunctions;
use sampler_ebpf::abi::ProcessKey;

use super::accounting;
use super::go_heaps::GoHeaps;
use super::in_memory;
use super::jit_code::JitCode;
use super::memory::MemoryReader;
use super::overflow_bucket::{HandedOver, OverflowBucket};
use super::recent::Recent;
use super::snapshot::{Detail, Measured, Often, Retired, Snapshot, SnapshotRow};
use super::symbolization::{Facts, Symbolization, UnsymbolizedStack};
use crate::crash::without_data;
use crate::plan::RecordPlan;
use crate::stats::{HookedProcess, Stats};

/// A finished profile and its accompanying data.
pub struct FinishedProfile {
    /// The profile.
    pub profile: Profile,
    /// The accounting at the moment of the snapshot.
    pub stats: Stats,
    /// Process generation of each process of the profile. Shorter than the profile's list, which ends with the
    /// processes of the overflow bucket.
    pub keys: Vec<ProcessKey>,
    /// Memory in use, divided by when it was allocated, for the marks of the request.
    pub recent: Recent,
    /// When the event path began to take the snapshot.
    pub begun: Instant,
    /// How long taking the snapshot blocked the event path.
    pub cost: Duration,
    /// CPU time of the snapshot and of making the profile.
    pub cpu: Duration,
}

/// Called with the finished profile.
type Then = Box<dyn FnOnce(FinishedProfile) + Send>;

enum Job {
    Make(Box<Snapshot>, Then, Place),
    Retire(Box<Retired>, Place),
    JitCode(ProcessKey, JitCode),
    Interval(u64),
    Tidy(Vec<UnsymbolizedStack>, Place),
    Look(Vec<Measured>),
}

/// A place in the queue of work that waits for names, held until the work is done; the handle has one as well.
type Place = Arc<()>;

/// Handle to the threads of the profile workers. When it is dropped, they complete the jobs in their queues and end.
pub struct ProfileWorker {
    jobs: Sender<Job>,
    totals: Sender<Job>,
    place: Place,
    /// Held by a cleanup that waits, too.
    cleanup: Place,
    progress: Arc<Progress>,
    emptied: Emptied,
    demangler: Demangler,
}

impl Drop for ProfileWorker {
    fn drop(&mut self) {
        self.demangler.end();
    }
}

/// Capacity for the rows of the next snapshot, if one is expected soon.
type Emptied = Arc<Mutex<Vec<SnapshotRow>>>;

impl ProfileWorker {
    /// Starts the profile workers. `functions`: those of language runtimes.
    ///
    /// # Errors
    /// The system cannot create the thread.
    pub fn start(plan: &RecordPlan, functions: Arc<RuntimeFunctions>) -> std::io::Result<Self> {
        let ((jobs, queue), (totals, queue_of_totals)) = (channel(), channel());
        let template = template(plan);
        let (symbolize, symbols, adjustments) =
            (plan.stacks.symbolize, plan.stacks.symbols.clone(), plan.outputs.adjustments);
        let demangler = symbols.demangler.clone();
        if symbolize {
            // Afterwards, no program may be started.
            demangler.start();
        }
        let progress = Arc::new(Progress::default());
        let own_progress = Arc::clone(&progress);
        let emptied = Emptied::default();
        let given_back = Arc::clone(&emptied);
        let writes_files = plan.writes_files();
        let (of_totals, no_symbols) = (template.clone(), symbols.clone());
        std::thread::Builder::new().name("totals".into()).spawn(move || {
            restrict_worker(false);
            let without_names = Symbolization::new(false, no_symbols, Arc::default());
            Worker::new(of_totals, adjustments, without_names).work(&queue_of_totals);
        })?;
        std::thread::Builder::new().name("profiles".into()).stack_size(STACK_BYTES).spawn(move || {
            restrict_worker(writes_files);
            let mut symbolization = Symbolization::new(symbolize, symbols, own_progress);
            symbolization.runtime_functions = functions;
            Worker { emptied: given_back, ..Worker::new(template, adjustments, symbolization) }.work(&queue);
        })?;
        Ok(Self { jobs, totals, place: Place::default(), cleanup: Place::default(), progress, emptied, demangler })
    }

    /// Progress of symbolization for the current profile: addresses done, and all addresses.
    pub fn progress(&self) -> (usize, usize) {
        self.progress.get()
    }

    /// The debug file that is being downloaded for the current profile.
    pub fn download(&self) -> Option<Download> {
        self.progress.get_download()
    }

    /// An empty list of rows, with the capacity of the last snapshot's list for a client that asks often.
    pub fn emptied(&self) -> Vec<SnapshotRow> {
        std::mem::take(&mut *self.emptied.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Queues a snapshot to be made into a profile. `then` runs in the worker thread. It is dropped without being
    /// called if the profile cannot be made.
    pub fn make(&self, snapshot: Snapshot, then: impl FnOnce(FinishedProfile) + Send + 'static) {
        let (jobs, place) = match snapshot.detail {
            Detail::Totals => (&self.totals, Place::default()),
            Detail::Stacks | Detail::Lifetimes => (&self.jobs, Arc::clone(&self.place)),
        };
        let _ = jobs.send(Job::Make(Box::new(snapshot), Box::new(then), place));
    }

    /// Whether so much work waits for names, which may come from servers, that no more should be added.
    pub fn is_behind(&self) -> bool {
        Arc::strong_count(&self.place) > MOST_WAITING
    }

    /// Records that from now on, this sampling interval (in trials) is in force: snapshots that are queued later are of
    /// a time after that.
    pub fn set_interval(&self, interval: u64) {
        for jobs in [&self.jobs, &self.totals] {
            let _ = jobs.send(Job::Interval(interval));
        }
    }

    /// Queues opening the perf map of a process that runs JIT code, so that its names can be read after it exits.
    pub fn open_jit_code(&self, process: ProcessKey, code: JitCode) {
        let _ = self.jobs.send(Job::JitCode(process, code));
    }

    /// Queues moving exited processes to the overflow bucket.
    pub fn retire(&self, retired: Retired) {
        let _ = self.totals.send(Job::Retire(Box::new(retired.without_stacks()), Place::default()));
        let _ = self.jobs.send(Job::Retire(Box::new(retired), Arc::clone(&self.place)));
    }

    /// Queues reading the memory of processes that may have ended when the next profile is made.
    pub fn look(&self, measured: Vec<Measured>) {
        let _ = self.jobs.send(Job::Look(measured));
    }

    /// Queues a cleanup: the worker forgets all symbolized stacks except those that `living` returns and returns free
    /// memory to the system. That takes milliseconds, so it is done here rather than on the event path. Returns false,
    /// without a call of `living`, if another cleanup waits.
    pub fn tidy(&self, living: impl FnOnce() -> Vec<UnsymbolizedStack>) -> bool {
        let may_queue = Arc::strong_count(&self.cleanup) == 1;
        if may_queue {
            let _ = self.jobs.send(Job::Tidy(living(), Arc::clone(&self.cleanup)));
        }
        may_queue
    }
}

/// Stack of the thread that finds names, bytes: readers of debug information call themselves for each level of nesting.
const STACK_BYTES: usize = 16 << 20;
/// Maximum number of profiles, and batches of exited processes, that wait for names.
const MOST_WAITING: usize = 16;
/// A profile that follows the last one sooner than this needs the same memory again.
const SOON: Duration = Duration::from_secs(10);
/// Longest time for which exited processes wait to be named, unless a profile is made. Each batch reads the files
/// again.
const LONGEST_UNNAMED: Duration = Duration::from_secs(15);
/// Maximum number of rows and exited processes that wait.
const MOST_UNNAMED: usize = 4096;
/// Time after which memory is returned to the system even if profiles come soon. Returning it takes milliseconds, and
/// so does using the pages again.
const GIVE_BACK_EVERY: Duration = Duration::from_secs(60);

/// Longest time for which measuring memory waits until the hooks of the last profile's processes have been removed.
const LONGEST_UNHOOKING: Duration = Duration::from_secs(2);

struct Worker {
    template: Profile,
    adjustments: Adjustments,
    symbolization: Symbolization,
    overflow: OverflowBucket,
    go: GoHeaps,
    /// When memory was last returned after a profile.
    gave_back: Option<Instant>,
    /// When the last profile was made.
    last_made: Option<Instant>,
    memory: MemoryReader,
    /// The rows' stacks of the last snapshot for a client that asks often, and their symbolized forms.
    last_stacks: Vec<(UnsymbolizedStack, Arc<Stack>)>,
    emptied: Emptied,
    unnamed: Unnamed,
    /// How often the worker has panicked, and the message of the last panic.
    panics: (u64, String),
}

/// Exited processes that have not been moved to the overflow bucket yet.
#[derive(Default)]
struct Unnamed {
    retired: Vec<Retired>,
    /// When the first of them arrived.
    since: Option<Instant>,
}

impl Unnamed {
    fn add(&mut self, retired: Retired) {
        self.since.get_or_insert_with(Instant::now);
        self.retired.push(retired);
    }

    fn is_due(&self) -> bool {
        let size: usize = self.retired.iter().map(|it| it.rows.len() + it.processes.len()).sum();
        size >= MOST_UNNAMED || self.since.is_some_and(|since| since.elapsed() >= LONGEST_UNNAMED)
    }
}

impl Worker {
    fn new(template: Profile, adjustments: Adjustments, symbolization: Symbolization) -> Self {
        let (overflow, go, gave_back, last_made, memory, last_stacks, emptied, unnamed) = Default::default();
        Self {
            template,
            adjustments,
            symbolization,
            overflow,
            go,
            gave_back,
            last_made,
            memory,
            last_stacks,
            emptied,
            unnamed,
            panics: Default::default(),
        }
    }

    /// Does the jobs of the queue until it is closed. A panic ends only the job in which it happens, and the worker
    /// goes on with the next one.
    fn work(mut self, queue: &Receiver<Job>) {
        while let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.work_off(queue))) {
            self.has_panicked(&*panic);
        }
    }

    fn work_off(&mut self, queue: &Receiver<Job>) {
        while let Ok(job) = queue.recv() {
            match job {
                Job::Make(snapshot, then, _place) => {
                    self.retire_all();
                    then(self.make(*snapshot));
                    self.give_back();
                }
                Job::Retire(retired, _place) => {
                    self.unnamed.add(*retired);
                    if self.unnamed.is_due() {
                        self.retire_all();
                    }
                }
                Job::Look(measured) => self.memory.look(measured),
                Job::JitCode(process, code) => self.symbolization.open_jit_code(process, code),
                Job::Interval(interval) => self.template.header.set_interval(interval),
                Job::Tidy(living, _place) => {
                    self.retire_all();
                    self.symbolization.keep_only(living.iter());
                    self.symbolization.forget_modules(&self.overflow.frames);
                    drop(living);
                    give_memory_back();
                }
            }
        }
    }

    /// Returns memory to the system, unless the next profile is likely to come soon: profiles may be requested twice a
    /// second.
    fn give_back(&mut self) {
        let comes_soon = self.last_made.replace(Instant::now()).is_some_and(|at| at.elapsed() < SOON);
        if !comes_soon || self.gave_back.is_none_or(|at| at.elapsed() >= GIVE_BACK_EVERY) {
            self.gave_back = Some(Instant::now());
            give_memory_back();
        }
    }

    fn has_panicked(&mut self, panic: &(dyn Any + Send)) {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("unknown");
        let text = without_data(text);
        self.panics = (self.panics.0 + 1, text.clone());
        if self.panics.0 == 1 {
            log::error!("an error inside heapbpf while a profile was made: {text}; the recording continues");
        } else {
            log::debug!("an error inside heapbpf for the {}th time: {text}", self.panics.0);
        }
        self.symbolization.begin_anew();
    }

    /// Symbolizes stacks. This reads files of targets: if it panics, it is tried again, and after that the stacks go
    /// without names.
    fn name<'a>(&mut self, stacks: impl Iterator<Item = &'a UnsymbolizedStack> + Clone, facts: Facts) {
        let Facts { modules, jit_code } = facts;
        self.symbolization.learn(modules);
        for names in [true, true, false] {
            let name = || self.symbolization.name(stacks.clone(), &jit_code, names);
            let Err(panic) = catch_unwind(AssertUnwindSafe(name)) else { break };
            self.has_panicked(&*panic);
        }
        self.symbolization.release_contents();
    }

    fn make(&mut self, mut snapshot: Snapshot) -> FinishedProfile {
        let cpu_before = thread_cpu_time();
        let (mut processes, mut idle) = (std::mem::take(&mut snapshot.processes), std::mem::take(&mut snapshot.idle));
        let is_often = snapshot.often.is_some();
        let is_refresh = is_often || snapshot.detail == Detail::Totals;
        let is_measured = !is_often || snapshot.detail == Detail::Lifetimes;
        if is_measured {
            // Before symbolization, which may take long.
            self.memory.read_arenas(&snapshot.measured, &processes, &idle, is_refresh);
        }
        // What is unmapped during symbolization would count as nothing.
        let remark = in_memory::add(&snapshot.measured, &mut snapshot.rows, &processes, is_measured);
        snapshot.notes.extend(remark);
        if snapshot.detail != Detail::Totals {
            let facts = std::mem::take(&mut snapshot.facts);
            self.name_rows(&snapshot.rows, facts, is_often);
        }
        self.measure(&mut snapshot, &mut processes, &mut idle, is_measured);
        // Read after symbolization, so that its cost is included.
        let mut stats = accounting::with_daemon_cost(snapshot.stats);
        let by_mark = snapshot.rows.iter_mut().map(|row| std::mem::take(&mut row.by_mark)).collect();
        let recent = if snapshot.marks.is_empty() { Recent::default() } else { Recent::new(snapshot.marks, by_mark) };
        let mut profile = self.template.clone();
        profile.header.started = snapshot.started;
        profile.header.duration = snapshot.duration;
        profile.header.growth_over = snapshot.growth_over;
        profile.header.unread = snapshot.unread;
        profile.header.time = snapshot.started + snapshot.duration;
        profile.counters = stats.counters();
        profile.notes = snapshot.notes;
        profile.processes = processes;
        profile.idle = idle;
        let first = profile.processes.len();
        profile.processes.extend_from_slice(self.overflow.processes());
        let known = |process: &Process| !process.inuse_unknown;
        profile.header.live = snapshot.live;
        if !snapshot.live {
            profile.processes.iter_mut().for_each(|process| process.inuse_unknown = false);
        }
        profile.header.live = profile.knows_some_inuse();
        let is_known =
            |row: &SnapshotRow| profile.header.live && profile.processes.get(row.key.process).is_none_or(known);
        profile.rows = match snapshot.often {
            Some(Often { mut rows }) => {
                rows.clear();
                let new = snapshot.rows.drain(..).enumerate();
                rows.extend(new.map(|(index, row)| self.row(is_known(&row), row, self.last_stacks.get(index))));
                *self.emptied.lock().unwrap_or_else(PoisonError::into_inner) = snapshot.rows;
                rows
            }
            None => snapshot.rows.into_iter().map(|row| self.row(is_known(&row), row, None)).collect(),
        };
        // For some processes, frees were not tracked all the time.
        let is_late = |process: usize| profile.processes.get(process).is_some_and(|it| it.inuse_since.is_some());
        profile.rows.iter_mut().filter(|row| is_late(row.key.process)).for_each(|row| row.growth = None);
        if snapshot.detail == Detail::Totals {
            profile.rows.extend(self.overflow.totals(first, profile.header.live));
        } else {
            profile.rows.extend(self.overflow.rows(first, profile.header.live));
        }
        profile.keep_loss_intervals();
        lost_samples::add_rows(&mut profile);
        stats.estimated_alloc_bytes += lost_samples::bytes(&profile);
        profile.modules = self.symbolization.modules().to_vec();
        if profile.header.live {
            let named = self.symbolization.enabled;
            self.go.add(&mut profile, snapshot.go, &snapshot.keys, snapshot.detail, named);
        }
        stats.hooks = HookedProcess::list(&profile.processes[..first]);
        profile.notes.extend(accounting::broken_chains(&profile));
        if profile.header.ended_apart {
            profile.notes.extend(accounting::memory_share(&profile));
        }
        profile.notes.extend(self.panic_note());
        if let Err(error) = self.adjustments.apply(&mut profile) {
            profile.notes.push(error.to_string());
        }
        let cpu = snapshot.cpu + thread_cpu_time().saturating_sub(cpu_before);
        FinishedProfile { profile, stats, keys: snapshot.keys, recent, begun: snapshot.begun, cost: snapshot.cost, cpu }
    }

    /// Measures the memory of processes, or gives them what was measured last.
    fn measure(
        &mut self,
        snapshot: &mut Snapshot,
        processes: &mut [Process],
        idle: &mut Vec<Process>,
        is_measured: bool,
    ) {
        let is_often = snapshot.often.is_some();
        if is_measured {
            if let Some(unhooked) = &snapshot.unhooked {
                // Nothing is ever sent.
                let _ = unhooked.recv_timeout(LONGEST_UNHOOKING);
            }
            self.memory.give_last(&snapshot.keys, processes, idle);
            let measured = std::mem::take(&mut snapshot.measured);
            self.memory.measure(measured, processes, idle, is_often || snapshot.detail == Detail::Totals);
        }
        if is_often {
            self.memory.keep_or_give(&snapshot.keys, processes, idle, is_measured);
        }
    }

    fn panic_note(&self) -> Option<String> {
        let (times, last) = &self.panics;
        (*times > 0).then(|| {
            let times = if *times == 1 { "once".to_owned() } else { format!("{times} times") };
            format!("making profiles failed {times} because of an error inside heapbpf ({last}): names may be missing")
        })
    }

    /// Symbolizes the stacks of rows, and forgets all others: a snapshot with stacks contains every live row.
    fn name_rows(&mut self, rows: &[SnapshotRow], facts: Facts, often: bool) {
        let is_same = |(row, (last, _)): (&SnapshotRow, &(UnsymbolizedStack, Arc<Stack>))| {
            row.key.stack.as_ref().is_some_and(|stack| stack.is(last))
        };
        if often && rows.len() == self.last_stacks.len() && rows.iter().zip(&self.last_stacks).all(is_same) {
            return;
        }
        self.last_stacks = Vec::new();
        let stacks = || rows.iter().filter_map(|row| row.key.stack.as_ref());
        self.name(stacks(), facts);
        self.symbolization.keep_only(stacks());
        if often && rows.len() == stacks().count() {
            self.last_stacks = stacks().map(|stack| (stack.clone(), self.symbolization.stack(stack))).collect();
        }
    }

    /// `known`: whether memory in use and lifetimes of blocks are known for its process. `last`: its stack, if it is
    /// known to be that of the last snapshot.
    fn row(&self, known: bool, row: SnapshotRow, last: Option<&(UnsymbolizedStack, Arc<Stack>)>) -> Row {
        let live = self.template.header.live && known;
        let symbolized = |stack: Option<UnsymbolizedStack>| match (stack, last) {
            (Some(_), Some((_, stack))) => Arc::clone(stack),
            (Some(stack), None) => self.symbolization.stack(&stack),
            (None, _) => Arc::default(),
        };
        Row {
            key: row.key.map_stack(symbolized),
            alloc: row.alloc,
            inuse: if known { row.inuse } else { SampleSums::default() },
            in_memory: row.in_memory.filter(|_| known),
            at_exit: if known { row.at_exit } else { SampleSums::default() },
            peak: live.then_some(row.peak),
            lifetimes: row.ages.filter(|_| live).and_then(|ages| lifetimes(&ages)),
            growth: row.growth.filter(|growth| live && growth.is_known()),
            member: None,
        }
    }

    /// Moves the waiting exited processes to the overflow bucket.
    fn retire_all(&mut self) {
        let mut retired = std::mem::take(&mut self.unnamed).retired;
        let mut facts = Facts::default();
        for Facts { modules, jit_code } in retired.iter_mut().map(|it| std::mem::take(&mut it.facts)) {
            facts.modules.extend(modules);
            facts.jit_code.extend(jit_code);
        }
        let rows = retired.iter().flat_map(|it| &it.rows);
        if !retired.is_empty() {
            self.name(rows.filter_map(|row| row.key.stack.as_ref()), facts);
        }
        for it in retired {
            // Other batches, and the profile that is to be made, do without it.
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.retire(it))) {
                self.has_panicked(&*panic);
            }
        }
    }

    fn retire(&mut self, retired: Retired) {
        let programs: Vec<usize> = retired.processes.iter().map(|process| self.overflow.program(process)).collect();
        for ((program, process), key) in programs.iter().zip(&retired.processes).zip(&retired.keys) {
            let handed_over = HandedOver::of(process, retired.held.contains(key));
            self.overflow.add_counts(*program, process, handed_over);
        }
        let known: Vec<bool> = retired.processes.iter().map(|process| !process.inuse_unknown).collect();
        let mut profile = self.template.clone();
        profile.rows = retired.rows.into_iter().map(|row| self.row(known[row.key.process], row, None)).collect();
        profile.processes = retired.processes;
        profile.keep_loss_intervals();
        lost_samples::add_rows(&mut profile);
        profile.rows.iter().for_each(|row| self.overflow.add_row(programs[row.key.process], row));
        self.symbolization.forget_processes(&retired.keys);
    }
}

fn template(plan: &RecordPlan) -> Profile {
    Profile::new(Header {
        version: env!("CARGO_PKG_VERSION").into(),
        unwind: plan.stacks.unwind.name().into(),
        live: plan.sampling.live,
        ended_apart: plan.ended_apart(),
        host: host_name(),
        ..Header::new(plan.sampling.interval, plan.sampling.criterion)
    })
}

/// Number of steps of the survival curve in a profile.
const CURVE_POINTS: usize = 32;

fn lifetimes(ages: &Ages) -> Option<Lifetimes> {
    let observations: Vec<Observation> = ages.observations().collect();
    let all: f64 = observations.iter().map(|observation| observation.weight).sum();
    let lifetimes = survival::lifetimes(&observations, CURVE_POINTS)?;
    // Only the total weight of temporary blocks is kept, not which blocks they are.
    let temporary = if all > 0.0 { ages.temporary() / all } else { 0.0 };
    Some(Lifetimes { temporary, ages: ages.octaves(), ..lifetimes })
}

fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").map(|name| name.trim().to_owned()).unwrap_or_default()
}

#[cfg(test)]
#[path = "worker_tests.rs"]
mod tests;
