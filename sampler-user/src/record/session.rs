//! One recording: wires kernel, host and heap together, and waits for what ends it.

mod governing;
mod status_line;

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::ExitStatus;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, bail};
use sampler_ebpf::abi::{Counters, LiveKey, ProcessKey};
use tokio::io::unix::AsyncFd;

use super::accounting::{self, DaemonCounters};
use super::attaching::Attaching;
use super::governor::Governor;
use super::profile::{ProfileMaker, SHARED_LINE};
use super::recorder::{Life, Recorder};
use super::signals::Signals;
use super::{command, notify, resolve_outputs, show_report, write_outputs, write_snapshot, write_stats};
use crate::cli::plan::RecordPlan;
use crate::cost::cpu_time::CpuTime;
use crate::cost::measure;
use crate::host::events::monotonic_ns;
use crate::host::{Host, HostOptions, limits};
use crate::kernel::KernelError;
use crate::kernel::live_map::{LiveEntries, LiveMap};
use crate::kernel::loader::Loader;
use crate::kernel::log::KernelLog;
use crate::kernel::object;
use crate::kernel::programs::Programs;
use crate::kernel::rings::Ring;
use crate::kernel::stack_traces::StackTraces;
use crate::kernel::steering::Steering;
use crate::kernel::totals::{Counts, Totals};
use crate::profile::model::Profile;
use crate::profile::stats::Stats;
use crate::sampling::constants::draw_constants;
use crate::sampling::size_classes::ClassSteering;
use crate::unwind::dwarf::{Limits, Unwinder};

use status_line::StatusLine;

/// Time between looks at the rings while events come.
const AWAKE_PAUSE: Duration = Duration::from_millis(10);
/// Time between looks while nothing happens; an event wakes us before.
const SLEEP_PAUSE: Duration = Duration::from_secs(1);
/// A process's last threads may still add to its counts shortly after its end was reported.
const COLLECT_AFTER_NS: u64 = 1_000_000_000;
/// Ended processes' mappings are kept this long for samples that are still on their way.
const KEEP_ENDED_NS: u64 = 10_000_000_000;

/// Ended processes that have a line of their own in the profile although they had no sample; the others share one.
const MOST_UNSAMPLED_LINES: usize = 4096;

/// Everything of one recording.
struct Session {
    plan: RecordPlan,
    attaching: Attaching,
    host: Host,
    events: Ring,
    stacks: Ring,
    live_map: LiveMap,
    live_entries: LiveEntries,
    totals: Totals,
    recorder: Recorder,
    maker: ProfileMaker,
    ended: Vec<(ProcessKey, u64)>,
    ended_counts: HashMap<ProcessKey, Counters>,
    started: SystemTime,
    started_ns: u64,
    lives: Vec<Life>,
    housekeeping_ns: u64,
    classes: Option<ClassSteering>,
    governor: Governor,
    cpu_time: CpuTime,
    detached_since_ns: Option<u64>,
    kernel_log: KernelLog,
}

/// Runs a recording.
pub async fn run(plan: RecordPlan) -> anyhow::Result<u8> {
    if let Err(error) = limits::raise() {
        log::warn!("cannot raise resource limits: {error}");
    }
    let mut session = Session::new(plan)?;
    let held = match session.plan.targets.command.as_slice() {
        [] => None,
        words => Some(command::hold(words).context("cannot start a process for the command")?),
    };
    session.attaching.start(&session.plan, held.as_ref().map(|held| held.pid), &mut session.host)?;
    session.recorder.set_functions(session.attaching.hooks.functions());
    let first = session.first_target(held.as_ref().map(|held| held.pid));
    let outputs = resolve_outputs(&session.plan, first.as_ref().map(|(comm, pid)| (comm.as_str(), *pid)));

    // Ctrl-C belongs to us from here on: probes are in place and a profile is owed.
    let mut signals = Signals::listen(held.as_ref().map(|held| held.pid))?;
    session.begin_governing();
    eprintln!("heapbpf: recording {}", session.describe_targets());
    notify::ready();
    let (status_sender, mut status) = tokio::sync::oneshot::channel::<ExitStatus>();
    let mut command_running = false;
    if let Some(held) = held {
        let program = session.plan.targets.command[0].to_string_lossy().into_owned();
        let mut child = held.release().with_context(|| format!("cannot execute {program}"))?;
        command_running = true;
        std::thread::spawn(move || child.wait().map(|status| status_sender.send(status)));
    }

    let events_fd = watch(duplicate(&session.events)?)?;
    let stacks_fd = watch(duplicate(&session.stacks)?)?;
    let host_fd = watch(duplicate_raw(session.host.as_raw_fd())?)?;
    let begun = Instant::now();
    let deadline = session.plan.duration.map(|duration| begun + duration);
    let mut next_snapshot = session.plan.every.map(|every| begun + every);
    let mut snapshots = 0;
    let mut exit_code = 0;
    let mut line = StatusLine::new(&session.plan);
    loop {
        let mut active = session.cycle()? > 0;
        if session.all_ended() && !command_running || deadline.is_some_and(|at| Instant::now() >= at) {
            break;
        }
        if let (Some(at), Some(every)) = (next_snapshot, session.plan.every)
            && Instant::now() >= at
        {
            snapshots += 1;
            let (profile, _) = session.profile(false)?;
            write_snapshot(&outputs, snapshots, &profile, &session.plan.write)?;
            next_snapshot = Some(at.max(Instant::now() - every) + every);
        }
        session.govern()?;
        line.show(&session, begun.elapsed());
        if !active {
            // Said before the last look: what comes after it wakes us.
            session.attaching.steering.set_sleeping(true)?;
            active = session.cycle()? > 0;
        }
        let pause = match (session.recorder.is_behind(), active) {
            (true, _) => Duration::ZERO,
            (false, true) => AWAKE_PAUSE,
            (false, false) => SLEEP_PAUSE,
        };
        let pause = [deadline, next_snapshot]
            .into_iter()
            .flatten()
            .map(|at| at.saturating_duration_since(Instant::now()))
            .fold(pause, Duration::min);
        let pause = pause.min(session.until_look());
        tokio::select! {
            guard = events_fd.readable() => guard?.clear_ready(),
            guard = stacks_fd.readable() => guard?.clear_ready(),
            guard = host_fd.readable() => guard?.clear_ready(),
            () = tokio::time::sleep(pause) => {}
            number = signals.next() => if signals.stops(number) {
                break;
            },
            ended = &mut status, if command_running => {
                command_running = false;
                signals.command_ended();
                exit_code = ended.map_or(1, command::exit_code);
            }
        }
        session.attaching.steering.set_sleeping(false)?;
    }
    line.clear();

    let (profile, stats) = session.finish()?;
    let files = write_outputs(&outputs, &profile, &session.plan.write)?;
    if let Some(path) = &session.plan.stats {
        write_stats(path, &stats)?;
    }
    show_report(&profile, &session.plan, &outputs, files);
    Ok(exit_code)
}

impl Session {
    /// Loads everything; nothing is attached yet.
    fn new(plan: RecordPlan) -> anyhow::Result<Self> {
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
        let programs = Programs::load(&loader, plan.live, plan.link)?;
        for (kind, why) in programs.refusals() {
            log::info!("this kernel has no {kind} links: {why}");
        }
        let sampling = (plan.interval, plan.live);
        let governor = Governor::new(measured.ok(), plan.budget, plan.automatic, sampling, monotonic_ns());
        let governor = if plan.budget_is_default { governor.patient() } else { governor };
        let host = Host::start(HostOptions::default())?;
        let unwinder = Unwinder::new(Limits { max_depth: plan.max_depth, ..Limits::default() });
        Ok(Self {
            events: Ring::open(&loader, "EVENTS")?,
            stacks: Ring::open(&loader, "STACKS")?,
            live_map: LiveMap::open(&loader)?,
            live_entries: LiveEntries::open(&loader)?,
            totals: Totals::open(&loader)?,
            recorder: Recorder::new(unwinder, StackTraces::open(&loader)?, plan.max_depth),
            maker: ProfileMaker::new(&plan),
            kernel_log: KernelLog::open(programs.logging_program()),
            attaching: Attaching::new(&plan, programs, steering),
            host,
            ended: Vec::new(),
            ended_counts: HashMap::new(),
            started: SystemTime::now(),
            started_ns: monotonic_ns(),
            lives: Vec::new(),
            housekeeping_ns: 0,
            classes,
            governor,
            cpu_time: CpuTime::begin(),
            detached_since_ns: None,
            plan,
        })
    }

    fn first_target(&self, command_pid: Option<u32>) -> Option<(String, u32)> {
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

    fn describe_targets(&self) -> String {
        let link = self.attaching.programs.kind;
        let files = self.attaching.hooks.hooked_files();
        let interval = self.plan.sampling();
        let who = match (self.plan.targets.are_named(), self.attaching.targets.awaited.len()) {
            (false, _) => "all matching processes".to_owned(),
            (true, 1) => "1 process".to_owned(),
            (true, n) => format!("{n} processes"),
        };
        format!("{who}, {interval} ({files} allocator files, {link} links)")
    }

    /// Whether every named target has ended.
    fn all_ended(&self) -> bool {
        self.plan.targets.are_named() && self.attaching.targets.awaited.is_empty()
    }

    /// Takes in everything that has happened. Returns how much that was.
    fn cycle(&mut self) -> anyhow::Result<usize> {
        self.recorder.poll(&mut self.host);
        let hooked = self.attaching.follow(&mut self.host);
        if hooked {
            self.recorder.set_functions(self.attaching.hooks.functions());
        }
        let records = self.recorder.drain(&mut self.events, &mut self.stacks, &mut self.host, &mut self.lives);
        for life in std::mem::take(&mut self.lives) {
            self.apply(life);
        }
        self.maker.note_processes(&self.recorder, &mut self.host, &self.attaching);
        let now = monotonic_ns();
        if now.saturating_sub(self.housekeeping_ns) > COLLECT_AFTER_NS {
            self.housekeeping_ns = now;
            self.housekeep(now);
        }
        Ok(records)
    }

    fn apply(&mut self, life: Life) {
        match life {
            Life::Forked { parent, child, time_ns } => {
                self.attaching.forked(parent.tgid, child, time_ns, &self.host);
            }
            Life::Replaced { ended, time_ns } => {
                self.maker.note(ended, time_ns.saturating_sub(1), &mut self.host, &self.attaching);
                let addresses = self.recorder.heap.replace(ended);
                self.forget_blocks(ended, addresses);
                self.ended.push((ended, monotonic_ns()));
            }
            Life::Ended { process, time_ns } => {
                self.maker.note(process, time_ns, &mut self.host, &self.attaching);
                let addresses = self.recorder.heap.end(process);
                self.forget_blocks(process, addresses);
                let now = monotonic_ns();
                self.attaching.ended(process.tgid, time_ns);
                self.maker.ended(process, self.attaching.targets.coverage(process.tgid, now));
                self.ended.push((process, now));
            }
        }
    }

    /// Blocks of an ended address space are no longer tracked.
    fn forget_blocks(&mut self, space: ProcessKey, addresses: Vec<u64>) {
        for address in addresses {
            self.live_entries.remove(LiveKey { space, address });
        }
    }

    /// Once a second: what is slow, or must wait a moment.
    fn housekeep(&mut self, now: u64) {
        self.kernel_log.flush();
        if let Err(error) = self.host.tick() {
            log::warn!("{error}");
        }
        self.host.lives_mut().expire(now.saturating_sub(KEEP_ENDED_NS));
        self.attaching.check_awaited(now);
        if let Some(table) = self.classes.as_mut().and_then(|classes| classes.reshare(self.recorder.heap.by_class()))
            && let Err(error) = self.attaching.steering.set_trials(table)
        {
            log::warn!("the intervals of size classes stay as they are: {error}");
        }
        self.attaching.targets.forget(now.saturating_sub(KEEP_ENDED_NS));
        self.collect_ended(now.saturating_sub(COLLECT_AFTER_NS));
    }

    /// Moves the counts of processes that ended before `before_ns` out of the kernel.
    fn collect_ended(&mut self, before_ns: u64) {
        let mut later = Vec::new();
        for (process, at_ns) in std::mem::take(&mut self.ended) {
            if at_ns > before_ns {
                later.push((process, at_ns));
            } else if let Some(counters) = self.totals.take(process) {
                let own = self.recorder.processes.contains_key(&process) || self.ended_counts.contains_key(&process);
                let line = if own || self.ended_counts.len() < MOST_UNSAMPLED_LINES {
                    process
                } else {
                    self.maker.share_line(process);
                    SHARED_LINE
                };
                self.ended_counts.entry(line).or_default().add(&counters);
            }
        }
        self.ended = later;
    }

    /// All counts: the kernel's, and those already taken out of it.
    fn counts(&self) -> anyhow::Result<Counts> {
        let mut counts = self.totals.read(&self.attaching.programs)?;
        for (process, counters) in &self.ended_counts {
            counts.processes.entry(*process).or_default().add(counters);
        }
        Ok(counts)
    }

    /// The profile of this moment. `last`: the probes are gone.
    fn profile(&mut self, last: bool) -> anyhow::Result<(Profile, Stats)> {
        if self.plan.live {
            self.reconcile()?;
        }
        let counts = self.counts()?;
        let mut total = counts.total();
        if !last {
            // Calls that are still running are no loss yet, nor hits that could be accounted for.
            total.sampled -= total.lost_in_flight.min(total.sampled);
            total.lost_in_flight = 0;
        }
        let daemon: DaemonCounters = self.recorder.daemon_counters();
        let estimated = self.recorder.heap.estimated().alloc_bytes;
        let mut profile = self.maker.make(
            &mut self.recorder,
            &mut self.host,
            &self.attaching,
            &counts,
            (self.started, self.started_ns),
        );
        // After the names were found: that costs, too.
        let audits = self.attaching.hooks.audit(self.attaching.programs.kind);
        self.learn_kinds();
        let probe_seconds = self.governor.probe_seconds(&total);
        let stats = accounting::stats(&total, &daemon, accounting::daemon_cost(), estimated, probe_seconds, &audits);
        profile.counters = stats.counters();
        profile.notes = accounting::remarks(&total, &daemon);
        profile.notes.extend(accounting::broken_chains(&profile));
        let seen: HashSet<u32> = profile.processes.iter().map(|process| process.pid).collect();
        profile.notes.extend(self.attaching.remarks(&seen));
        profile.notes.extend(self.plan.sampling_note());
        profile.notes.extend(self.governor.notes(monotonic_ns()));
        if self.governor.gave_up_frees(self.plan.live) {
            profile.live = false;
        }
        if let Err(error) = self.plan.adjustments.apply(&mut profile) {
            profile.notes.push(error.to_string());
        }
        Ok((profile, stats))
    }

    /// Heals the heap from frees that were not reported: the kernel's live map is the truth.
    fn reconcile(&mut self) -> anyhow::Result<()> {
        self.cycle()?;
        let mut truth: HashMap<ProcessKey, HashSet<u64>> = HashMap::new();
        self.live_map.scan(|key, value| {
            truth.entry(key.space).or_default().insert(value.sample);
        })?;
        self.recorder.counters.frees_healed += self.recorder.heap.reconcile(&truth);
        Ok(())
    }

    /// Takes the probes away, takes in what is left, and makes the last profile.
    fn finish(&mut self) -> anyhow::Result<(Profile, Stats)> {
        self.attaching.hooks.release_all();
        if let Some(since) = self.detached_since_ns.take() {
            let now = monotonic_ns();
            self.attaching.uncovered(now.saturating_sub(since), now);
        }
        while self.cycle()? > 0 || self.recorder.is_waiting() {}
        self.profile(true)
    }
}

/// Registers a descriptor with the reactor.
fn watch(fd: OwnedFd) -> std::io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the descriptor is owned by the result and closed with it, after it has left the reactor.
    unsafe { AsyncFd::register(fd) }.map_err(Into::into)
}

/// A descriptor of our own for the reactor: it must not close the ring's.
fn duplicate(fd: &impl AsFd) -> std::io::Result<OwnedFd> {
    fd.as_fd().try_clone_to_owned()
}

fn duplicate_raw(fd: i32) -> std::io::Result<OwnedFd> {
    // SAFETY: the descriptor is open for as long as its owner, which outlives this call.
    unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()
}
