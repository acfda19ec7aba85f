//! The state of one recording: kernel, host and heap, wired together.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::thread::Builder;
use std::time::Duration;

use anyhow::{Context, bail};
use heapbpf_attach::files::Sources;
use heapbpf_attach::inline::{InlineHooks, Sampling as InlineSampling};
use heapbpf_heap::event::Event;
use heapbpf_heap::live::Heap;
use heapbpf_host::Host;
use heapbpf_host::arch;
use heapbpf_host::clock::{monotonic_ns, suspended_ns};
use heapbpf_host::limits::{links_need_admin, module_files};
use heapbpf_host::own_code::leave_the_file;
use heapbpf_host::own_memory::give_memory_back;
use heapbpf_host::processes::GenerationId;
use heapbpf_kernel::KernelError;
use heapbpf_kernel::control::ControlMaps;
use heapbpf_kernel::generations::Generations;
use heapbpf_kernel::guardian::Guardian;
use heapbpf_kernel::inline::{self, InlineMap, InlinePrograms};
use heapbpf_kernel::live_map::{LiveEntries, LiveMap};
use heapbpf_kernel::loader::Loader;
use heapbpf_kernel::mappings::MappingProbes;
use heapbpf_kernel::object;
use heapbpf_kernel::programs::{Programs, When};
use heapbpf_kernel::ring_maps::RingId;
use heapbpf_kernel::rings::Ring;
use heapbpf_kernel::totals::{Counts, Totals};
use heapbpf_symbols::runtime_functions::RuntimeFunctions;
use heapbpf_unwind::dwarf::{Limits, Unwinder};
use sampler_ebpf::abi::{Config, Counters, ProcessKey};
use sampler_ebpf::constants::draw_constants;

use super::cut::{Blocks, Cuts};
use super::ends::ExitedProcesses;
use super::errors::{Errors, Step};
use super::growth::Hurry;
use super::overhead::Overhead;
use super::schedule::Schedule;
use crate::attaching::probes::{Attaching, KernelProbes};
use crate::budget::controller::OverheadController;
use crate::budget::inline_advice::InlineAdvice;
use crate::cost::measure;
use crate::intake::lives::Lives;
use crate::intake::recorder::Recorder;
use crate::plan::{Hook, RecordPlan};
use crate::profiles::capture::Parts;
use crate::profiles::describe::Descriptions;
use crate::profiles::requests::Request;
use crate::profiles::worker::ProfileWorker;
use crate::ring_sizes::Growth;
use crate::sampling::size_classes::SizeClassController;

/// Longest time without the kernel's counters. After that it is unknown what is missing from the figures, and the
/// recording ends with the profile so far.
const LONGEST_BLIND: Duration = Duration::from_secs(30);

/// The kernel-side maps that a recording reads.
pub(super) struct KernelMaps {
    /// Small records.
    pub(super) events: Ring,
    /// Stack copies.
    pub(super) stacks: Ring,
    /// Decides the sizes of these two.
    pub(super) growth: Growth,
    pub(super) live_map: LiveMap,
    pub(super) live_entries: LiveEntries,
    pub(super) totals: Totals,
}

impl KernelMaps {
    /// Opens the maps. Programs that are linked afterwards find their rings.
    fn open(loader: &Loader, plan: &RecordPlan) -> anyhow::Result<Self> {
        // Loading the BPF programs took much memory, and mapping a ring makes all its pages resident.
        give_memory_back();
        Ok(Self {
            events: Ring::open(loader, RingId::Events)?,
            stacks: Ring::open(loader, RingId::Stacks)?,
            growth: Growth::new(&plan.kernel.rings),
            live_map: LiveMap::open(loader)?,
            live_entries: LiveEntries::open(loader)?,
            totals: Totals::open(loader)?,
        })
    }
}

/// The state of one recording.
pub(super) struct Session {
    /// The options of the recording.
    pub(super) plan: RecordPlan,
    /// Probes and targets.
    pub(super) attaching: Attaching,
    /// Processes and modules.
    pub(super) host: Host,
    pub(super) kernel: KernelMaps,
    /// The heap.
    pub(super) recorder: Recorder,
    /// Process events that have not been acted upon yet.
    pub(super) process_events: Vec<Event>,
    /// Which process generations there are, and how each ended.
    pub(super) lives: Lives,
    pub(super) exited: ExitedProcesses,
    pub(super) descriptions: Descriptions,
    pub(super) worker: ProfileWorker,
    pub(super) cuts: Cuts,
    pub(super) schedule: Schedule,
    /// The raised priority while stack copies fill their ring.
    pub(super) hurry: Hurry,
    /// Keeps the recording within its budget.
    pub(super) overhead: Overhead,
    pub(super) classes: Option<SizeClassController>,
    pub(super) housekeeping: Housekeeping,
    pub(super) errors: Errors,
    pub(super) unfinished: Unfinished,
    /// Keys of processes that run Go programs, which need not be known from samples.
    pub(super) go: HashMap<GenerationId, ProcessKey>,
    /// Active processes that are to be hooked, the busiest last.
    pub(super) due: Vec<ProcessKey>,
    /// Those for which another thread is working, and when they are tried again (CLOCK_MONOTONIC).
    pub(super) under_way: VecDeque<(u64, ProcessKey)>,
}

/// State of the housekeeping.
#[derive(Default)]
pub(super) struct Housekeeping {
    /// When it last ran (CLOCK_MONOTONIC).
    pub(super) done_ns: u64,
    /// Rows moved to the overflow bucket since the profile worker last learned which stacks are still in use.
    pub(super) retired_rows: usize,
    /// When unused unwind sections were last dropped (CLOCK_MONOTONIC).
    pub(super) dropped_unused_ns: u64,
    /// Processes forgotten since memory was last returned to the system, and when that was (CLOCK_MONOTONIC).
    pub(super) forgotten: (usize, u64),
    /// Number of modules that had to be kept when some were last forgotten.
    pub(super) modules: usize,
}

/// Work that an error has prevented, or that is still to be done.
#[derive(Default)]
pub(super) struct Unfinished {
    /// Requests that wait for a snapshot, oldest first.
    pub(super) requests: VecDeque<Request>,
    /// The sampling interval to set.
    pub(super) interval: Option<u64>,
    /// Whether the intervals of size classes are to be set.
    pub(super) classes: bool,
    /// Whether the BPF programs were last told that the daemon sleeps.
    pub(super) is_sleeping_set: bool,
    /// Why the recording had to end.
    pub(super) ended_early: Option<String>,
    /// That a signal killed the command, and which one.
    pub(super) killed_by: Option<String>,
}

impl Session {
    /// Loads the BPF programs and opens the maps. Attaches nothing.
    pub(super) fn new(plan: RecordPlan) -> anyhow::Result<Self> {
        let object = object::object().ok_or(KernelError::NoObject)?;
        // Probes that serve more than one process would trap in this process, too.
        if (plan.targets.follow || !plan.targets.are_named())
            && let Err(error) = leave_the_file()
        {
            log::info!("heapbpf's own allocations will trap at probes of the whole host: {error}");
        }
        let (sampling, kernel) = (&plan.sampling, &plan.kernel);
        let config = Config { began_ns: monotonic_ns() + suspended_ns(), ..kernel.config };
        let loader = Arc::new(Loader::new(object, &config, &kernel.sizes)?);
        let mut control = ControlMaps::open(&loader)?;
        let Some(draw) = draw_constants(sampling.interval) else {
            bail!("the sampling interval {} is too large", sampling.interval);
        };
        control.set_draw(draw)?;
        let classes = sampling.classes.clone().map(SizeClassController::new);
        if let Some(classes) = &classes {
            control.set_trials(&classes.table)?;
        }
        let measured = measure::known_or_measured(object, kernel.link)
            .inspect_err(|error| log::info!("cannot measure what probes cost: {error:#}"));
        let guardian = Guardian::started(links_need_admin(kernel.link));
        let files = module_files();
        let host = load_ahead(&loader, &plan, || Host::start(files));
        let maps = KernelMaps::open(&loader, &plan)?;
        let ends = plan.hooks_inline().then(|| inline::link_ends(&loader));
        let (mut programs, sources) = load_programs(&loader, &plan, &guardian)?;
        let mappings = sampling.mappings.then(|| MappingProbes::load(&loader)).transpose()?;
        let mut controller = OverheadController::new(measured.ok(), plan.budget, sampling, monotonic_ns());
        controller.advice = controller.measured().and_then(|measured| InlineAdvice::new(&plan, measured));
        let heap = Heap::new(plan.ended_apart()).with_row_limit(plan.stacks.most as usize);
        let max_depth = plan.stacks.max_depth;
        let unwinder = Unwinder::new(Limits { max_depth, ..Limits::default() }, arch::address_bits());
        let inline = if let Some(ends) = ends {
            programs.lifecycle.inline_ends = ends;
            load_inline(&loader, &plan, (&programs, &guardian))?
        } else {
            None
        };
        let (criterion, sizes, lossless) = (config.criterion as u32, &plan.kernel.sizes, plan.kernel.lossless);
        let how = InlineSampling { draw, seed: config.seed, criterion, live_max: sizes.live_max, lossless };
        // Children of targets by a rule are targets, too: at the least, the same rule matches them.
        let follows = plan.targets.follow || !plan.targets.are_named();
        let inline = inline
            .map(|hooking| {
                let maps = (InlineMap::open(&loader)?, Generations::open(&programs)?);
                Ok::<_, KernelError>(InlineHooks::new(hooking, maps, how, follows))
            })
            .transpose()?;
        let names = Arc::new(RuntimeFunctions::default());
        let walked = loader.stack_traces()?;
        let inline_is_asked = plan.kernel.hook == Hook::Inline;
        let probes =
            KernelProbes { programs, control, mappings, inline, inline_is_asked, sources, began_ns: config.began_ns };
        Ok(Self {
            kernel: maps,
            recorder: Recorder::new(unwinder, walked, max_depth, heap, Arc::clone(&names)),
            worker: ProfileWorker::start(&plan, names).context("cannot start a thread")?,
            attaching: Attaching::new(&plan.targets, plan.sampling.live, probes),
            host: host?,
            process_events: Vec::new(),
            lives: Lives::default(),
            exited: ExitedProcesses::default(),
            descriptions: Descriptions::default(),
            cuts: Cuts::default(),
            schedule: Schedule::begin(),
            hurry: Hurry::default(),
            overhead: Overhead::new(controller),
            classes,
            housekeeping: Housekeeping::default(),
            errors: Errors::default(),
            unfinished: Unfinished::default(),
            go: HashMap::new(),
            due: Vec::new(),
            under_way: VecDeque::new(),
            plan,
        })
    }

    /// Name and process id of the target, if there is only one.
    pub(super) fn first_target(&self, command_pid: Option<u32>) -> Option<(String, u32)> {
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

    /// Describes the targets and how they are sampled, for the user.
    pub(super) fn describe_targets(&self) -> String {
        let interval = match self.plan.kernel.hook {
            Hook::Usdt => "samples announced by USDT".to_owned(),
            _ => self.plan.sampling.describe(),
        };
        let who = match (self.plan.targets.are_named(), self.attaching.targets.named_alive.len()) {
            (false, _) => "all matching processes".to_owned(),
            (true, 1) => "1 process".to_owned(),
            (true, n) => format!("{n} processes"),
        };
        format!("{who}, {interval} ({})", self.describe_hooks())
    }

    /// Describes how the targets are counted.
    fn describe_hooks(&self) -> String {
        let takes_in = self.attaching.takes_in();
        // A command's probes serve it up to its entry point only.
        let files = self.attaching.hooks.probed_files(self.attaching.held.filter(|_| takes_in));
        let files = if files == 1 { "1 allocator file".to_owned() } else { format!("{files} allocator files") };
        match (takes_in, files.as_str()) {
            (true, "0 allocator files") => "counted from inside".to_owned(),
            (true, files) => format!("counted from inside, and by probes in {files}"),
            (false, files) => format!("counted by probes in {files}"),
        }
    }

    /// Counts that are still in the kernel, by process, and the sum of these and of all counts taken out of the kernel.
    pub(super) fn counts(&mut self) -> anyhow::Result<(Counts, Counters)> {
        self.attaching.inline.iter_mut().for_each(|inline| inline.counted.read());
        let mut counts = self.kernel.totals.read(&self.attaching.programs)?;
        if let Some(inline) = &mut self.attaching.inline {
            inline.counted.read();
            inline.counted.add_to(&mut counts);
        }
        Ok(self.with_total(counts))
    }

    /// The same without what only processes with inline hooks have counted so far. Much less work if there are many.
    pub(super) fn kernel_counts(&self) -> anyhow::Result<(Counts, Counters)> {
        Ok(self.with_total(self.kernel.totals.read(&self.attaching.programs)?))
    }

    fn with_total(&self, counts: Counts) -> (Counts, Counters) {
        let mut total = counts.total();
        total.add(&self.exited.counts.total);
        (counts, total)
    }

    /// The parts that snapshots are made from. `slack` and `unseen` are those of a [`Cut`](super::cut::Cut).
    pub(super) fn parts<'a>(&'a mut self, counts: &'a Counts, (slack, unseen): (&'a Blocks, &'a Blocks)) -> Parts<'a> {
        Parts {
            recorder: &mut self.recorder,
            host: &mut self.host,
            attaching: &self.attaching,
            descriptions: &mut self.descriptions,
            counts,
            slack,
            unseen,
            ledger: &self.cuts.ledger,
            ended: &self.exited.counts,
            also: Vec::new(),
            marks_ns: Vec::new(),
            most_blocks: None,
            emptied: Vec::new(),
        }
    }

    /// Process ids of live targets, as far as they are known.
    pub(super) fn target_pids(&self) -> impl Iterator<Item = u32> {
        let waited_for = self.attaching.targets.named_alive.iter().copied();
        waited_for.chain(self.recorder.processes.keys().map(|process| process.tgid))
    }

    /// Tells the BPF programs whether the daemon sleeps. Returns whether that worked.
    pub(super) fn set_sleeping(&mut self, sleeps: bool) -> bool {
        if !sleeps && !self.unfinished.is_sleeping_set {
            return true;
        }
        if !self.may_try(Step::Sleep) {
            return false;
        }
        let outcome = self.attaching.control.set_sleeping(sleeps);
        let worked = self.errors.note(Step::Sleep, outcome, monotonic_ns()).is_some();
        if worked {
            self.unfinished.is_sleeping_set = sleeps;
        }
        worked
    }

    /// Whether a step may be tried now.
    pub(super) fn may_try(&self, step: Step) -> bool {
        self.errors.may_try(step, monotonic_ns())
    }

    /// Time until the oldest request can be answered; `None` without requests.
    pub(super) fn until_answer(&self) -> Option<Duration> {
        (!self.unfinished.requests.is_empty()).then(|| self.errors.until_retry(Step::Counters, monotonic_ns()))
    }

    /// Why the recording cannot go on, if it cannot.
    pub(super) fn must_end(&self) -> Option<String> {
        (self.errors.failing_for(Step::Counters, monotonic_ns()) >= LONGEST_BLIND).then(|| {
            format!(
                "the kernel's counters could not be read for {} s ({}), so what is missing from the figures is unknown",
                LONGEST_BLIND.as_secs(),
                self.errors.last(Step::Counters)
            )
        })
    }
}

/// When the programs of probes are loaded. A command has probes until it waits at its entry point. Other processes are
/// most likely hooked inline.
fn when_probes_are_loaded(plan: &RecordPlan) -> When {
    let has_command = !plan.targets.command.is_empty();
    match (plan.hooks_inline(), has_command) {
        (true, false) => When::IfNeeded,
        (true, true) => When::AtOnce,
        (false, false) if plan.targets.are_named() => When::AtOnce,
        (false, _) => When::Ahead,
    }
}

/// Loads in parallel what this recording will most likely need. Returns the result of `meanwhile`, which runs at the
/// same time on this thread.
fn load_ahead<T>(loader: &Loader, plan: &RecordPlan, meanwhile: impl FnOnce() -> T) -> T {
    let (kind, live) = (Programs::likely_kind(loader, plan.kernel.link), plan.sampling.live);
    let mut wanted = Programs::wanted(kind, live, when_probes_are_loaded(plan));
    if plan.hooks_inline() {
        wanted.extend(InlinePrograms::wanted(kind));
    }
    let load = || loader.load_ahead(&wanted);
    std::thread::scope(|scope| {
        if Builder::new().spawn_scoped(scope, load).is_err() {
            load();
        }
        meanwhile()
    })
}

/// Loads the programs of inline hooks. If that fails and the user did not ask for inline hooks, the recording uses
/// probes.
fn load_inline(
    loader: &Loader,
    plan: &RecordPlan,
    (programs, guardian): (&Programs, &Guardian),
) -> Result<Option<InlinePrograms>, KernelError> {
    match InlinePrograms::load(loader, (programs.kind, plan.sampling.live), guardian) {
        Err(error) if plan.kernel.hook == Hook::Auto => {
            log::warn!("no process gets inline hooks: {error}");
            Ok(None)
        }
        loaded => loaded.map(Some),
    }
}

fn load_programs(loader: &Arc<Loader>, plan: &RecordPlan, guardian: &Guardian) -> anyhow::Result<(Programs, Sources)> {
    let live = plan.sampling.live;
    let probes = when_probes_are_loaded(plan);
    let mut programs = Programs::load(loader, (live, probes), plan.kernel.link, guardian)?;
    let sources = match plan.kernel.hook {
        Hook::Usdt => {
            programs.follow_announcements(live, false)?;
            Sources::Announcements
        }
        Hook::Auto if plan.follows_announcements() => match programs.follow_announcements(live, true) {
            Ok(()) => Sources::AllocatorsOrAnnouncements,
            Err(error) => {
                log::info!("samples that programs announce (USDT) are not followed: {error}");
                Sources::Allocators
            }
        },
        Hook::Auto | Hook::Probe | Hook::Inline => Sources::Allocators,
    };
    for (kind, why) in &programs.refusals {
        log::info!("this kernel has no {kind} links: {why}");
    }
    if !programs.links_one_process {
        log::info!("this kernel's links to one process see its first thread only: every process is linked");
    }
    Ok((programs, sources))
}
