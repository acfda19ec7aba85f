//! The probes of a recording, with what is known about the modules and processes that they serve.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use heapbpf_attach::closing::Closing;
use heapbpf_attach::detours::Detours;
use heapbpf_attach::files::{FileKey, Sources};
use heapbpf_attach::hooks::{HookError, Hooked, Hooks};
use heapbpf_attach::inline::InlineHooks;
use heapbpf_attach::inline::standing::Standing;
use heapbpf_attach::rules;
use heapbpf_audit::Missing;
use heapbpf_host::Host;
use heapbpf_host::clock::monotonic_ns;
use heapbpf_host::limits::process_files;
use heapbpf_host::mappings::ModuleId;
use heapbpf_host::process::{Stat, Target};
use heapbpf_host::processes::{Generation, GenerationId, HostChange};
use heapbpf_kernel::KernelError;
use heapbpf_kernel::control::ControlMaps;
use heapbpf_kernel::exec_watch::ExecWatch;
use heapbpf_kernel::mappings::MappingProbes;
use heapbpf_kernel::programs::{Links, Programs};
use heapbpf_probes::{CustomAllocator, Runtime, Table};
use heapbpf_profile::model::Process;
use sampler_ebpf::abi::ProcessKey;

use super::breaker::Tripped;
use super::executed::ExecutedPrograms;
use super::missed::{Forked, Missed, Refusals};
use super::objects::Objects;
use super::others::OthersHooks;
use super::runtimes::{GoPrograms, Interpreters};
use super::taking_in::Members;
use super::targets::{Coverage, TargetSet};
use crate::budget::activity::{Activity, places};
use crate::cost::{cpu_time, cpus};
use crate::plan::Targets;

/// Time between checks of modules that other threads are still examining, or that wait to be hooked inline. Their
/// allocations are not seen before that.
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(5);
/// The same for modules that were mapped recently. Examining and hooking one takes three or more checks.
const LOOK_SOON_AFTER: Duration = Duration::from_millis(1);
/// For how long a module was mapped recently, ns.
const RECENT_NS: u64 = 50_000_000;
/// For how long in each [`SOON_EVERY_NS`] such modules are looked at that soon, ns: some programs map files all the
/// time.
const SOON_FOR_NS: u64 = 100_000_000;
/// The shortest time between the beginnings of two such times, ns.
const SOON_EVERY_NS: u64 = 1_000_000_000;

/// Time between checks of processes that are about to wait at their entry point.
const LOOK_AT_HELD_AFTER: Duration = Duration::from_micros(500);

/// Result of analysing a module.
pub(super) enum Look {
    /// A file to hook.
    Hook(FileKey),
    /// Nothing to hook.
    Nothing,
    /// A file without an allocator, in which a program announces its samples.
    Announces(FileKey),
    /// Nothing to hook, but a language runtime with a heap of its own.
    Runtime(Runtime),
    /// A file that is not hooked, and why.
    Refused(Missing),
}

impl Look {
    pub(super) fn file(&self) -> Option<FileKey> {
        if let Self::Hook(key) = self { Some(*key) } else { None }
    }

    /// The file that is probed, whether for its allocator or for what it announces.
    pub(super) fn probed_file(&self) -> Option<FileKey> {
        if let Self::Hook(key) | Self::Announces(key) = self { Some(*key) } else { None }
    }
}

/// CPU time of a process at a moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spent {
    /// The moment (CLOCK_MONOTONIC).
    pub(super) at_ns: u64,
    /// CPU time of all its threads, ns; 0 if it has ended.
    pub(super) cpu_ns: u64,
}

impl Spent {
    pub(super) fn now(pid: u32) -> Self {
        Self { at_ns: monotonic_ns(), cpu_ns: Self::of_living(pid).unwrap_or(0) }
    }

    /// CPU time of all threads of a process now, ns. `None` if it has ended.
    pub(crate) fn of_living(pid: u32) -> Option<u64> {
        cpu_time::of_process(pid).map(|seconds| (seconds * 1e9) as u64)
    }
}

/// A module that a process mapped, and that another thread is still examining or linking, or that waits to be hooked
/// inline.
#[derive(Clone, Copy, Debug)]
pub(super) struct UnderWay {
    pub(super) generation: GenerationId,
    pub(super) module: ModuleId,
    /// When it was first looked at, where processes are hooked one by one.
    pub(super) began: Option<Spent>,
    /// When its process was forked (CLOCK_MONOTONIC), if the links that should have served it by then are being made.
    pub(super) forked_ns: Option<u64>,
}

/// Time until modules are looked at again. `began_ns`: when the latest of them was first looked at. `soon_since_ns`:
/// see [`soon_since`].
fn look_after(began_ns: Option<u64>, soon_since_ns: u64, now_ns: u64) -> Duration {
    let is_recent = began_ns.is_some_and(|began_ns| now_ns.saturating_sub(began_ns) < RECENT_NS);
    let is_soon = is_recent && now_ns.saturating_sub(soon_since_ns) < SOON_FOR_NS;
    if is_soon { LOOK_SOON_AFTER } else { LOOK_AGAIN_AFTER }
}

/// Since when recently mapped modules are looked at soon, after another one was first looked at. Before, this was
/// `since_ns`.
const fn soon_since(since_ns: u64, began_ns: u64) -> u64 {
    if began_ns.saturating_sub(since_ns) >= SOON_EVERY_NS { began_ns } else { since_ns }
}

/// The probes of a recording.
pub struct Attaching {
    /// BPF programs that the probes run.
    pub programs: Arc<Programs>,
    /// Control maps of these programs.
    pub control: ControlMaps,
    /// Hooked files.
    pub hooks: Hooks,
    /// Links that nothing needs any more.
    closing: Closing<Links>,
    /// Inline hooks, if they are wanted.
    pub inline: Option<InlineHooks>,
    /// Whether the user asked for inline hooks, so that processes without them must be reported.
    pub(super) inline_is_asked: bool,
    /// Processes without inline hooks, and why.
    pub(super) refusals: Refusals,
    /// Set when a process died of its inline hooks: the remark about it.
    pub(super) tripped: Option<Tripped>,
    /// The process of a command that is to be hooked inline at its entry point, and has not reached it yet.
    pub held: Option<u32>,
    /// Which processes have inline hooks, and why others have none.
    pub standing: Standing,
    /// The profiled processes.
    pub targets: TargetSet,
    /// Whether processes become targets by a rule, rather than because they or their ancestors are named.
    pub(super) global: bool,
    /// Named processes with links of their own. Shared links count all others.
    pub(crate) own: HashSet<u32>,
    /// Whether shared links count a named process, or a child of one.
    pub(crate) shares: bool,
    /// Processes whose own links are to be released because shared links count them.
    pub(super) left: Vec<u32>,
    pub(super) modules: HashMap<ModuleId, Look>,
    /// Those of them that are new since [`Attaching::take_new_code`] was last called, if mappings are sorted.
    pub(super) new_code: Vec<ModuleId>,
    pub(super) refused: BTreeSet<String>,
    /// Why the kernel refused links to a file that has an allocator.
    pub(super) refused_by_kernel: Option<String>,
    pub(super) custom: Vec<CustomAllocator>,
    pub(super) rules: Vec<Target>,
    /// Whether children of targets are targets.
    pub(super) follows: bool,
    /// Processes that are targets because their parent is one, while probes serve every process.
    pub(super) followed: HashSet<u32>,
    /// Whether processes become targets by properties that can change while they run.
    pub(super) members_change: bool,
    /// Whether a target has ended, or executed another program.
    pub(super) had_targets: bool,
    pub(super) missed: Missed,
    /// Named processes that have ended and in which no allocator was found.
    pub(crate) without_allocator: Vec<Process>,
    /// `exec_id` of the process generation that ended last, for each target that executed another program.
    last_exec: HashMap<u32, u32>,
    pub(super) changes: Vec<HostChange>,
    /// Ends that the host reported: process id and time (CLOCK_MONOTONIC).
    pub(crate) heard_ends: Vec<(u32, u64)>,
    /// Whether the recording has not begun yet.
    pub(super) is_starting: bool,
    /// Modules that processes mapped and that other threads are still examining, or that wait to be hooked inline.
    pub(super) under_way: Vec<UnderWay>,
    /// See [`soon_since`] (CLOCK_MONOTONIC).
    soon_since_ns: u64,
    /// Python interpreters.
    pub(crate) interpreters: Interpreters,
    /// Interpreters that are led around copies of their object allocator.
    pub(crate) detours: Detours,
    /// Whether Python objects are counted in processes that are hooked inline.
    pub(super) counts_objects_inside: bool,
    /// What is known about object allocators.
    pub(super) objects: Objects,
    /// JVMs, and why some of them cannot be read.
    pub(super) jvms: HashMap<ModuleId, Option<heapbpf_java::Unsupported>>,
    /// Go programs.
    pub(super) go: GoPrograms,
    /// Inline hooks of other heapbpfs in targets.
    pub(crate) others: OthersHooks,
    /// The counted processes, where processes are taken in one by one.
    pub(crate) members: Members,
    /// The programs that targets have executed.
    pub(crate) executed: ExecutedPrograms,
    /// CPU time of processes, where processes are taken in one by one.
    pub(crate) activity: Option<Activity>,
    /// Makes targets that execute a program wait at its entry point.
    pub(crate) execs: Option<ExecWatch>,
    /// When hooking and releasing stop (CLOCK_MONOTONIC): each takes milliseconds.
    pub(crate) until_ns: u64,
}

/// The kernel side of the probes.
pub struct KernelProbes {
    /// BPF programs that the probes run.
    pub programs: Programs,
    /// Control maps of these programs.
    pub control: ControlMaps,
    /// Probes of mappings that programs make themselves, if these are counted.
    pub mappings: Option<MappingProbes>,
    /// Inline hooks, if they are wanted.
    pub inline: Option<InlineHooks>,
    /// Whether the user asked for them.
    pub inline_is_asked: bool,
    /// What samples are made from.
    pub sources: Sources,
    /// When the recording began (CLOCK_BOOTTIME), ns.
    pub began_ns: u64,
}

impl Attaching {
    /// Creates the probes of a recording; none is attached yet.
    pub fn new(targets: &Targets, live: bool, kernel: KernelProbes) -> Self {
        let KernelProbes { programs, control, mappings, inline, inline_is_asked, sources, began_ns } = kernel;
        let rules = rules::of_this_kernel(Some(&programs));
        let hooks_inline = inline.is_some();
        let table = Table::new(&targets.allocators).with_objects(targets.objects.are_probed(hooks_inline));
        let mut hooks = Hooks::new(rules, table, live);
        (hooks.files.sources, hooks.mappings) = (sources, mappings);
        if let Some(inline) = &inline {
            inline.read_with(&mut hooks.files);
        }
        Self {
            programs: Arc::new(programs),
            control,
            closing: Closing::new(Links::close),
            inline,
            inline_is_asked,
            refusals: Refusals::default(),
            tripped: None,
            held: None,
            standing: Standing::new(sources == Sources::Announcements, hooks_inline),
            hooks,
            targets: TargetSet::new(hooks_inline),
            global: !targets.are_named(),
            own: HashSet::new(),
            shares: !targets.are_named() && !hooks_inline,
            left: Vec::new(),
            modules: HashMap::new(),
            new_code: Vec::new(),
            refused: BTreeSet::new(),
            refused_by_kernel: None,
            custom: targets.allocators.clone(),
            rules: targets.rules.clone(),
            follows: targets.follow,
            followed: HashSet::new(),
            members_change: targets.have_changing_members(),
            had_targets: false,
            missed: Missed::default(),
            without_allocator: Vec::new(),
            last_exec: HashMap::new(),
            changes: Vec::new(),
            heard_ends: Vec::new(),
            is_starting: true,
            under_way: Vec::new(),
            soon_since_ns: 0,
            interpreters: Interpreters::default(),
            detours: Detours::default(),
            counts_objects_inside: targets.objects.are_counted_inside(hooks_inline),
            objects: Objects::default(),
            jvms: HashMap::new(),
            go: GoPrograms::default(),
            others: OthersHooks::default(),
            members: Members::default(),
            executed: ExecutedPrograms::default(),
            execs: None,
            activity: hooks_inline.then(|| {
                let activity = Activity::new(cpus::online(), began_ns, !targets.are_all());
                activity.with_places(places(process_files()))
            }),
            until_ns: u64::MAX,
        }
    }

    /// Makes links to a file. Once the recording has begun, another thread makes them, and
    /// [`HookError::UnderWay`] is returned until it has.
    pub(super) fn link(&mut self, key: FileKey, pid: Option<u32>) -> Result<Hooked, HookError> {
        let Self { hooks, programs, control, .. } = self;
        if self.is_starting {
            hooks.hook(key, pid, &**programs, control)
        } else {
            hooks.hook_aside(key, pid, &*programs, control)
        }
    }

    /// Takes in links that the other thread has made, and closes those that nothing needs any more.
    pub(super) fn look_at_links(&mut self) {
        self.hooks.take_in_made(self.programs.kind);
        self.close_loose();
    }

    fn close_loose(&mut self) {
        self.hooks.take_loose().into_iter().for_each(|links| self.closing.close(links));
    }

    /// Removes all links. Another thread closes them, which is waited for when this is dropped: the kernel takes tens
    /// of milliseconds for each.
    pub fn release_links(&mut self) {
        self.hooks.loosen_all();
        self.close_loose();
    }

    /// Lets go of links to files that no process has mapped for a while: they keep the file systems in use.
    pub(crate) fn let_go_of_unmapped(&mut self, host: &Host) {
        if self.is_over() || self.hooks.served(None).next().is_none() {
            return;
        }
        let running = host.processes().iter().filter(|process| process.until_ns.is_none());
        let mapped: HashSet<ModuleId> = running.flat_map(|process| process.space.modules()).collect();
        let looks = self.modules.iter().filter(|(module, _)| mapped.contains(*module));
        let files: HashSet<FileKey> = looks.filter_map(|(_, look)| look.probed_file()).collect();
        self.hooks.let_go_of_unmapped(Instant::now(), |key| files.contains(&key));
    }

    pub(crate) fn is_over(&self) -> bool {
        monotonic_ns() >= self.until_ns
    }

    /// Time until modules that are being examined should be checked again.
    pub fn until_look(&self) -> Option<Duration> {
        if self.holds_members() {
            return Some(LOOK_AT_HELD_AFTER);
        }
        let waits = !self.under_way.is_empty() || !self.interpreters.unled.is_empty() || self.awaits_members();
        let began = |under_way: &UnderWay| under_way.began.map(|began| began.at_ns);
        let began_ns = self.under_way.iter().filter_map(began).max();
        let next = waits.then(|| look_after(began_ns, self.soon_since_ns, monotonic_ns()));
        next.into_iter().chain(self.objects.until_look()).chain(self.others.until_look(monotonic_ns())).min()
    }

    /// Keeps a module that cannot be hooked yet.
    pub(super) fn look_later(&mut self, under_way: UnderWay) {
        if let Some(began) = under_way.began {
            self.soon_since_ns = soon_since(self.soon_since_ns, began.at_ns);
        }
        self.under_way.push(under_way);
    }

    /// Notes that figures of a process have arrived.
    pub fn has_figures(&mut self, process: ProcessKey) {
        if self.is_current_program(process) {
            self.missed.forget(process.tgid);
        }
    }

    /// Notes that a target executed another program, which ended its process generation.
    pub fn replaced(&mut self, ended: ProcessKey) {
        // If this is heard late, what is known may be the next program's.
        let hooked = self.inline.as_ref().and_then(|inline| inline.hooked_program(ended.tgid));
        if hooked.is_none_or(|hooked| hooked.exec_id <= ended.exec_id) {
            self.standing.forget(ended.tgid);
            self.objects.young.remove(&ended.tgid);
        }
        let last = self.last_exec.entry(ended.tgid).or_default();
        *last = ended.exec_id.max(*last);
    }

    /// Whether a process has not executed another program since.
    pub fn is_current_program(&self, process: ProcessKey) -> bool {
        self.last_exec.get(&process.tgid).is_none_or(|ended| *ended < process.exec_id)
    }

    /// Forgets processes that ended before `before_ns`.
    pub fn forget_ended(&mut self, before_ns: u64) {
        self.targets.forget(before_ns).into_iter().for_each(|pid| self.standing.forget_ended(pid));
        self.last_exec.retain(|pid, _| self.targets.coverages.contains_key(pid));
        self.last_exec.shrink_to(2 * self.last_exec.len());
        self.followed.retain(|pid| self.targets.coverages.contains_key(pid));
        self.followed.shrink_to(2 * self.followed.len());
    }

    /// Lets the kernel check processes again that are not targets, if a new name or cgroup may have made them targets.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn look_again(&mut self) -> Result<(), KernelError> {
        if self.members_change { self.control.look_again() } else { Ok(()) }
    }

    /// Removes all probes for good: nothing is hooked from now on. CPU time is not reported any more either, as it is
    /// no longer counted.
    pub fn detach(&mut self) {
        let now_ns = monotonic_ns();
        self.targets.detached_ns = Some(now_ns);
        self.until_ns = now_ns;
        (self.activity, self.execs) = (None, None);
        self.release_links();
    }

    /// Handles the end of a process.
    pub fn ended(&mut self, pid: u32, now_ns: u64, host: &Host) {
        let is_named = self.targets.named_alive.contains(&pid);
        // Processes that started after the probes were detached were not to be hooked.
        let began_in_time =
            |coverage: &Coverage| self.targets.detached_ns.is_none_or(|at_ns| coverage.since_ns < at_ns);
        let late = |coverage: &Coverage| (!coverage.hooked || coverage.uncovered_ns > 0) && began_in_time(coverage);
        if !self.global && is_named && self.targets.coverages.get(&pid).is_some_and(late) {
            let generation = host.processes().at(pid, now_ns);
            let comm = generation.map_or_else(|| "".into(), |generation| generation.info.comm.clone());
            let forked = generation.and_then(|generation| self.forked_with_links(generation));
            match forked {
                Some(forked) => self.missed.note_forked(pid, comm, forked),
                None => self.missed.note(pid, comm),
            }
        }
        if !self.global && is_named {
            self.note_without_allocator(pid, now_ns, host);
        }
        self.targets.end(pid, now_ns);
        self.member_ended(pid);
        self.own.remove(&pid);
        // Near the end of the recording all links are released soon anyway.
        if !self.is_over() {
            self.hooks.release(pid);
        }
    }

    /// The parent of a process that still runs its parent's program, if links that serve every process count both.
    fn forked_with_links(&self, child: &Generation) -> Option<Forked> {
        let parent = child.info.parent_pid;
        let is_shared = self.shares && !self.takes_in() && !self.own.contains(&parent);
        let is_forked = is_shared && !self.last_exec.contains_key(&child.id.pid);
        is_forked.then_some(Forked { parent, since_ns: child.since_ns })
    }

    /// Finds ends of targets that were not reported because the record was lost, or because the target never allocated.
    pub fn find_unreported_ends(&mut self, now_ns: u64, host: &Host) {
        let gone: Vec<u32> = self.targets.named_alive.iter().copied().filter(|pid| !is_alive(*pid)).collect();
        for pid in gone {
            self.control.remove_target(pid);
            self.ended(pid, now_ns, host);
        }
    }
}

/// Whether a process is alive, which it still is if its first thread has ended and others run.
pub(crate) fn is_alive(pid: u32) -> bool {
    Stat::read(pid).is_ok_and(|stat| !(stat.without_memory && stat.threads <= 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_looked_at_soon_unless_they_come_all_the_time() {
        const MS: u64 = 1_000_000;
        let hour = 3_600_000 * MS;
        let since = soon_since(0, hour);
        let after = |ms: u64| look_after(Some(hour), since, hour + ms * MS);
        assert_eq!([0, 49, 50].map(after), [LOOK_SOON_AFTER, LOOK_SOON_AFTER, LOOK_AGAIN_AFTER]);
        assert_eq!(look_after(None, since, hour), LOOK_AGAIN_AFTER);
        // One in each millisecond, for ten seconds.
        let mut since = 0;
        let soon = (0..10_000_u64).filter(|ms| {
            let now_ns = hour + ms * MS;
            since = soon_since(since, now_ns);
            look_after(Some(now_ns), since, now_ns) == LOOK_SOON_AFTER
        });
        assert_eq!(soon.count(), 1000);
    }
}
