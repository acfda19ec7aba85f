//! One recording: wires kernel, host and heap together, takes in what happens, gives snapshots away.

mod cut;
mod finish;
mod governing;
mod hurry;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, bail};
use sampler_ebpf::abi::{Counters, LiveKey, ProcessKey};

use self::cut::{BegunCut, Cut, End};
pub use self::finish::Finishing;
use self::hurry::Hurry;
use super::accounting::{self, DaemonCounters};
use super::attaching::Attaching;
use super::describe::{Descriptions, SHARED_LINE};
use super::ended::EndedCounts;
use super::files::SnapshotFiles;
use super::free_groups::Frees;
use super::governor::Governor;
use super::losses::LossLedger;
use super::maker::Maker;
use super::recorder::{Life, Recorder};
use super::requests::Request;
use super::snapshot::{self, Content, Detail, Parts, Snapshot};
use super::window_progress::WindowProgress;
use super::window_times::WindowTimes;
use crate::cli::plan::RecordPlan;
use crate::cost::cpu_time::CpuTime;
use crate::cost::measure;
use crate::heap::live::{Heap, LostBlocks};
use crate::host::events::monotonic_ns;
use crate::host::{Host, HostOptions};
use crate::kernel::KernelError;
use crate::kernel::live_map::{LiveEntries, LiveMap};
use crate::kernel::loader::Loader;
use crate::kernel::log::KernelLog;
use crate::kernel::mappings::MappingProbes;
use crate::kernel::object;
use crate::kernel::programs::Programs;
use crate::kernel::rings::Ring;
use crate::kernel::stack_traces::StackTraces;
use crate::kernel::steering::Steering;
use crate::kernel::totals::{Counts, Totals};
use crate::profile::stats::Stats;
use crate::sampling::constants::draw_constants;
use crate::sampling::size_classes::ClassSteering;
use crate::unwind::dwarf::{Limits, Unwinder};
use crate::unwind::raw::RawStack;

/// A process's last threads may still add to its counts shortly after its end was reported.
const COLLECT_AFTER_NS: u64 = 1_000_000_000;
/// What concerns ended processes is kept this long for records that are still on their way.
const KEEP_ENDED_NS: u64 = 10_000_000_000;
/// The same for the mappings of those without samples, most of the memory in a storm of processes, when the rings have
/// been emptied: then samples wait for their stacks at most, which takes a second.
const KEEP_UNSAMPLED_NS: u64 = 2_000_000_000;
/// After so many lives the memory that they took is worth giving back, which takes some milliseconds: not too often.
const MANY_LIVES: usize = 256;
const GIVE_BACK_EVERY_NS: u64 = 5_000_000_000;
/// The same after fewer.
const GIVE_BACK_LAST_NS: u64 = 15_000_000_000;
/// After so many rows of ended processes their names are forgotten, if no snapshot with stacks came before.
const MANY_RETIRED_ROWS: usize = 16_384;

/// Ended processes that have a line of their own in the profile although they had no sample; the others share one.
const MOST_UNSAMPLED_LINES: usize = 4096;

/// Sampled blocks, by process.
type Blocks = HashMap<ProcessKey, LostBlocks>;

/// Everything of one recording.
pub struct Session {
    /// What was asked for.
    pub plan: RecordPlan,
    /// Probes and targets.
    pub attaching: Attaching,
    /// Processes and modules.
    pub host: Host,
    /// Small records.
    pub events: Ring,
    /// Stack copies.
    pub stacks: Ring,
    live_map: LiveMap,
    live_entries: LiveEntries,
    totals: Totals,
    /// The heap.
    pub recorder: Recorder,
    maker: Maker,
    descriptions: Descriptions,
    ended: Vec<(ProcessKey, u64)>,
    ended_counts: EndedCounts,
    /// Processes that ended and are still among the living ones' figures.
    retiring: HashSet<ProcessKey>,
    /// Rows put with the residue since the maker was told which ones stay.
    retired_rows: usize,
    /// What lost records may have done to figures.
    ledger: LossLedger,
    /// How address spaces ended since the last reconciliation, and when that was heard of (CLOCK_MONOTONIC): the live map
    /// may have more blocks of them than are known.
    gone: HashMap<ProcessKey, (End, u64)>,
    /// When the recording ends (CLOCK_MONOTONIC), if that is known.
    ends_ns: Option<u64>,
    /// The cut that nobody waits for.
    waiting_cut: Option<BegunCut>,
    /// It ends soon: at its end, nobody else should be at the CPU.
    last_hurry: Option<Hurry>,
    /// Stands for the stacks of samples whose records were lost.
    lost_stack: Option<Arc<RawStack>>,
    started: SystemTime,
    started_ns: u64,
    lives: Vec<Life>,
    housekeeping_ns: u64,
    classes: Option<ClassSteering>,
    /// Frees up to the governor's last look.
    frees: Frees,
    /// Keeps the recording within its budget.
    pub governor: Governor,
    cpu_time: CpuTime,
    windows: WindowTimes,
    progress: WindowProgress,
    kernel_log: KernelLog,
    /// Lives forgotten since memory was last given back, and when that was.
    forgotten: (usize, u64),
}

impl Session {
    /// Loads everything; nothing is attached yet.
    pub fn new(plan: RecordPlan) -> anyhow::Result<Self> {
        let object = object::object().ok_or(KernelError::NoObject)?;
        let loader = Loader::new(object, &plan.config, &plan.sizes)?;
        let mut steering = Steering::open(&loader)?;
        let Some(draw) = draw_constants(plan.interval) else {
            bail!("the sampling interval {} is too large", plan.interval);
        };
        steering.set_draw(draw)?;
        let classes = plan.classes.clone().map(ClassSteering::new);
        if let Some(classes) = &classes {
            steering.set_trials(classes.table())?;
        }
        let measured = measure::known_or_measured(object, plan.link)
            .inspect_err(|error| log::info!("cannot measure what probes cost: {error:#}"));
        let mut programs = Programs::load(&loader, plan.live, plan.link)?;
        if !plan.targets.allocators.is_empty() {
            programs.load_ends(&loader)?;
        }
        for (kind, why) in programs.refusals() {
            log::info!("this kernel has no {kind} links: {why}");
        }
        let mappings = plan.mappings.then(|| MappingProbes::load(&loader)).transpose()?;
        let sampling = (plan.interval, plan.live);
        let governor = Governor::new(measured.ok(), plan.budget, plan.automatic, sampling, monotonic_ns());
        let governor = if plan.budget_is_default { governor.patient() } else { governor };
        let host = Host::start(HostOptions::default())?;
        let heap = Heap::new(plan.ended_apart()).with_most_rows(plan.stacks_max as usize);
        let unwinder = Unwinder::new(Limits { max_depth: plan.max_depth, ..Limits::default() });
        Ok(Self {
            events: Ring::open(&loader, "EVENTS")?,
            stacks: Ring::open(&loader, "STACKS")?,
            live_map: LiveMap::open(&loader)?,
            live_entries: LiveEntries::open(&loader)?,
            totals: Totals::open(&loader)?,
            kernel_log: KernelLog::open(programs.logging_program()),
            recorder: Recorder::new(unwinder, StackTraces::open(&loader)?, plan.max_depth, heap),
            maker: Maker::start(&plan).context("cannot start a thread")?,
            descriptions: Descriptions::default(),
            retiring: HashSet::new(),
            retired_rows: 0,
            ledger: LossLedger::default(),
            gone: HashMap::new(),
            ends_ns: None,
            waiting_cut: None,
            last_hurry: None,
            lost_stack: None,
            attaching: Attaching::new(&plan, programs, steering, mappings),
            host,
            ended: Vec::new(),
            ended_counts: EndedCounts::default(),
            started: SystemTime::now(),
            started_ns: monotonic_ns(),
            lives: Vec::new(),
            housekeeping_ns: 0,
            classes,
            frees: Frees::default(),
            governor,
            cpu_time: CpuTime::begin(),
            windows: WindowTimes::default(),
            progress: WindowProgress::default(),
            forgotten: (0, 0),
            plan,
        })
    }

    pub fn first_target(&self, command_pid: Option<u32>) -> Option<(String, u32)> {
        let targets = &self.plan.targets;
        if let (Some(pid), Some(program)) = (command_pid, targets.command.first()) {
            let name = std::path::Path::new(program).file_name().unwrap_or(program).to_string_lossy().into_owned();
            return Some((name, pid));
        }
        match targets.running.as_slice() {
            [only] if targets.are_named() => Some((only.comm.to_string(), only.pid)),
            _ => None,
        }
    }

    pub fn describe_targets(&self) -> String {
        let link = self.attaching.programs.kind;
        let files = self.attaching.hooks.hooked_files();
        let interval = self.plan.sampling();
        let who = match (self.plan.targets.are_named(), self.attaching.targets.awaited.len()) {
            (false, _) => "all matching processes".to_owned(),
            (true, 1) => "1 process".to_owned(),
            (true, n) => format!("{n} processes"),
        };
        let files = if files == 1 { "1 allocator file".to_owned() } else { format!("{files} allocator files") };
        format!("{who}, {interval} ({files}, {link} links)")
    }

    /// Whether every named target has ended.
    pub fn all_ended(&self) -> bool {
        self.plan.targets.are_named() && self.attaching.targets.awaited.is_empty()
    }

    /// Takes in everything that has happened. Returns how much that was.
    pub fn cycle(&mut self) -> anyhow::Result<usize> {
        self.recorder.poll(&mut self.host);
        let hooked = self.attaching.follow(&mut self.host);
        if hooked {
            self.recorder.set_functions(self.attaching.hooks.functions());
        }
        let records = self.take_in();
        self.complete_waiting_cut();
        let now = monotonic_ns();
        if now.saturating_sub(self.housekeeping_ns) > COLLECT_AFTER_NS {
            self.housekeeping_ns = now;
            self.housekeep(now)?;
        }
        Ok(records)
    }

    /// Takes in what is in the rings. Returns how many records that were.
    fn take_in(&mut self) -> usize {
        let latest_ns = self.ends_ns.filter(|_| !self.has_ended()).unwrap_or(u64::MAX);
        let records =
            self.recorder.drain(&mut self.events, &mut self.stacks, &mut self.host, &mut self.lives, latest_ns);
        for (process, time_ns) in self.recorder.take_code_makers() {
            let own = snapshot::own_code_of(process, time_ns, &mut self.host);
            self.maker.open_own_code(process, own);
        }
        for life in std::mem::take(&mut self.lives) {
            self.apply(life);
        }
        if self.descriptions.note_new(&self.recorder, &mut self.host, &self.attaching) {
            self.leave_heaps();
        }
        for (space, address) in self.recorder.heap.take_left() {
            self.live_entries.remove(LiveKey { space, address });
        }
        records
    }

    fn apply(&mut self, life: Life) {
        match life {
            Life::Forked { parent, child, time_ns } => {
                self.attaching.forked(parent.tgid, child, time_ns, &self.host);
            }
            Life::Replaced { ended, time_ns } => {
                self.recorder.poll(&mut self.host);
                let replaced = self.host.lives().replaced_at(ended.tgid, time_ns).map(|life| life.since_ns);
                let sampled = self.recorder.processes.get(&ended).copied();
                let at_ns = sampled.or(replaced).unwrap_or(time_ns);
                self.descriptions.note(ended, at_ns, &mut self.host, &self.attaching);
                self.replace_heap(ended);
                let now = monotonic_ns();
                self.gone.insert(ended, (End::Exec, now));
                self.attaching.replaced(ended);
                self.descriptions.ended(ended, self.attaching.targets.coverage_before(ended.tgid, time_ns));
                self.ended.push((ended, now));
            }
            Life::Ended { process, time_ns } => {
                self.descriptions.note(process, time_ns, &mut self.host, &self.attaching);
                self.end_heap(process);
                let now = monotonic_ns();
                self.gone.insert(process, (End::Exit, now));
                self.attaching.ended(process.tgid, time_ns, &self.host);
                self.descriptions.ended(process, self.attaching.targets.coverage(process.tgid, now));
                self.ended.push((process, now));
            }
        }
    }

    /// Once a second: what is slow, or must wait a moment.
    fn housekeep(&mut self, now: u64) -> anyhow::Result<()> {
        self.kernel_log.flush();
        self.reconcile_if_lossy()?;
        if let Err(error) = self.host.tick() {
            log::warn!("{error}");
        }
        let keep_ns = if self.recorder.is_behind() { KEEP_ENDED_NS } else { KEEP_UNSAMPLED_NS };
        self.forgotten.0 += self.host.expire(now.saturating_sub(keep_ns), now.saturating_sub(KEEP_ENDED_NS));
        self.attaching.check_awaited(now, &self.host);
        self.leave_heaps();
        if let Some(table) = self.classes.as_mut().and_then(|classes| classes.reshare(self.recorder.heap.by_class()))
            && let Err(error) = self.attaching.steering.set_trials(table)
        {
            log::warn!("the intervals of size classes stay as they are: {error}");
        }
        self.attaching.forget_ended(now.saturating_sub(KEEP_ENDED_NS));
        self.collect_ended(now.saturating_sub(COLLECT_AFTER_NS));
        self.retire();
        let (lives, given_back_ns) = self.forgotten;
        let wait_ns = if lives > MANY_LIVES { GIVE_BACK_EVERY_NS } else { GIVE_BACK_LAST_NS };
        if lives > 0 && now.saturating_sub(given_back_ns) > wait_ns {
            // Once more after many: names are forgotten in another thread, and then what only they referred to.
            self.forgotten = (usize::from(lives > MANY_LIVES), now);
            self.give_memory_back();
        }
        Ok(())
    }

    /// Gives back the room that a storm of processes took.
    fn give_memory_back(&mut self) {
        self.events.shrink();
        self.stacks.shrink();
        self.recorder.shrink();
        self.descriptions.shrink();
        self.ended.shrink_to_fit();
        self.tidy();
    }

    /// Forgets names that are of no more use.
    fn tidy(&mut self) {
        self.retired_rows = 0;
        self.maker.tidy(self.recorder.heap.stacks());
    }

    /// Moves the counts of processes that ended before `before_ns` out of the kernel.
    fn collect_ended(&mut self, before_ns: u64) {
        let (ended, later): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.ended).into_iter().partition(|(_, at_ns)| *at_ns <= before_ns);
        self.recorder.forget_places(&ended.iter().map(|(process, _)| *process).collect());
        for (process, _) in ended {
            let has_line = self.recorder.processes.contains_key(&process) || self.ended_counts.get(&process).is_some();
            let own = has_line || self.plan.keeps_running() || self.ended_counts.lines() < MOST_UNSAMPLED_LINES;
            let counters = self.totals.take(process).unwrap_or_default();
            let called = counters.hits() > 0;
            if called {
                self.attaching.has_figures(process);
            }
            if called && !own {
                self.descriptions.share_line(process);
            }
            self.ended_counts.add(if own { process } else { SHARED_LINE }, &counters);
            if self.plan.keeps_running() {
                self.retiring.insert(process);
            } else if !called && !has_line {
                self.descriptions.forget_one(process);
            }
        }
        self.ended = later;
    }

    /// Counts that are still in the kernel, by process, and the sum of these and of all that were taken out of it.
    pub fn counts(&self) -> anyhow::Result<(Counts, Counters)> {
        let counts = self.totals.read(&self.attaching.programs)?;
        let mut total = counts.total();
        total.add(self.ended_counts.total());
        Ok((counts, total))
    }

    /// Everything of this moment, for profiles.
    fn snapshot(&mut self, detail: Detail) -> anyhow::Result<Snapshot> {
        let begun = Instant::now();
        self.with_cut(|session, cut| Ok(session.snapshot_of(cut, detail, false, begun)))
    }

    /// Everything of a cut that was begun then. `last`: it is the recording's end.
    fn snapshot_of(&mut self, cut: &Cut, detail: Detail, last: bool, begun: Instant) -> Snapshot {
        let mut total = cut.total;
        if !last {
            // Calls that are still running are no loss yet, nor hits that could be accounted for.
            total.sampled -= total.lost_in_flight.min(total.sampled);
            total.lost_in_flight = 0;
        }
        let daemon: DaemonCounters = self.recorder.daemon_counters();
        let estimated = self.recorder.heap.estimated().alloc_bytes;
        let audits = self.attaching.hooks.audit();
        self.learn_kinds();
        let probe_seconds = self.governor.probe_seconds(&total);
        let stats = Stats {
            probe_costs: self.governor.measured().cloned(),
            ..accounting::stats(&total, &daemon, accounting::daemon_cost(), estimated, probe_seconds, &audits)
        };
        let Content { keys, processes, rows, facts } =
            self.parts(&cut.counts, (&cut.slack, &cut.unseen)).take(detail, cut.time_ns);
        let mut notes = accounting::remarks(&total, &daemon);
        let seen: HashSet<u32> =
            keys.iter().filter(|key| self.attaching.is_last_life(**key)).map(|key| key.tgid).collect();
        notes.extend(self.attaching.remarks(&seen));
        notes.extend(accounting::put_together(daemon.stacks_put_together));
        notes.extend(self.plan.sampling_note());
        notes.extend(self.governor.notes(monotonic_ns()));
        notes.extend(self.progress.note());
        let duration = Duration::from_nanos(cut.time_ns.saturating_sub(self.started_ns));
        Snapshot {
            detail,
            live: self.plan.live && !self.governor.gave_up_frees(self.plan.live),
            time_windows: self.windows.were_used(),
            started: self.started,
            duration,
            unread: cut.unread,
            keys,
            processes,
            rows,
            facts,
            stats,
            notes,
            begun,
            cost: begun.elapsed(),
        }
    }

    /// `slack`, `unseen`: as those of a [`Cut`].
    fn parts<'a>(&'a mut self, counts: &'a Counts, (slack, unseen): (&'a Blocks, &'a Blocks)) -> Parts<'a> {
        Parts {
            recorder: &mut self.recorder,
            host: &mut self.host,
            attaching: &self.attaching,
            descriptions: &mut self.descriptions,
            counts,
            slack,
            unseen,
            ledger: &self.ledger,
            ended: &self.ended_counts,
        }
    }

    /// Has a profile of this moment made and sent where it was asked for.
    pub fn answer(&mut self, request: Request) -> anyhow::Result<()> {
        // Who asked may have gone away while waiting.
        if !request.reply.is_closed() {
            let snapshot = self.snapshot(request.detail)?;
            self.maker.make(snapshot, |made| drop(request.reply.send(made)));
        }
        Ok(())
    }

    /// Has a numbered snapshot written, if one is wanted and none is being written.
    pub fn write_snapshot(&mut self, files: &mut SnapshotFiles) -> anyhow::Result<()> {
        let Some((turn, why)) = files.next() else { return Ok(()) };
        let mut snapshot = self.snapshot(Detail::Lifetimes)?;
        log::info!("a snapshot, {why}");
        snapshot.notes.push(format!("a snapshot, {why}"));
        self.maker.make(snapshot, move |made| {
            if let Err(error) = turn.write(&made.profile) {
                log::warn!("a snapshot was not written: {error}");
            }
        });
        Ok(())
    }

    /// Puts processes that ended with the residue. Everything of them has arrived: records are worked off in order.
    fn retire(&mut self) {
        if self.retiring.is_empty() {
            return;
        }
        let ended = std::mem::take(&mut self.retiring);
        let (retired, held) = self.parts(&Counts::default(), (&Blocks::new(), &Blocks::new())).retire(&ended);
        self.retired_rows += retired.rows.len();
        let done: HashSet<ProcessKey> = ended.difference(&held).copied().collect();
        self.ended_counts.forget(&done);
        self.maker.retire(retired);
        if self.retired_rows >= MANY_RETIRED_ROWS {
            self.tidy();
        }
        self.recorder.forget(&done);
        self.descriptions.forget(&done, &self.recorder);
        self.retiring = held;
    }

    /// Process ids of targets that live, as far as they are known.
    pub fn target_pids(&self) -> impl Iterator<Item = u32> {
        let awaited = self.attaching.targets.awaited.iter().copied();
        awaited.chain(self.recorder.processes.keys().map(|process| process.tgid))
    }
}
