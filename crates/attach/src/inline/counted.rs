//! The processes that inline hooks count: those that were hooked, and children that inherited the hooks.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fs::File;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use heapbpf_host::clock::{cpu_seconds_of, monotonic_ns, suspended_ns};
use heapbpf_host::side_by_side::{on_all_processors, online_processors};
use heapbpf_inline::read::Counts;
use heapbpf_kernel::inline::{InlineLinks, InlineMap};
use heapbpf_kernel::totals;
use sampler_ebpf::abi::inline::{InlineProcess, MAX_ALLOCATORS, inline_state};
use sampler_ebpf::abi::{Counters, ProcessKey};

use super::breaker::Ours;
use super::figures::{self, KernelSampled};
use super::refused::Refused;
use super::removal::{leads_to_ours, take_out_at, take_out_now, take_out_since, take_out_unless_at_rest};
use super::sampling::SetBound;
use super::{limits, memory};
use crate::closing::Closing;
use crate::files::FileKey;

/// Maximum number of rounds for removing the hooks from all processes, because processes may fork in between.
const ROUNDS: usize = 64;

/// A process whose counts have been unreadable for this long runs without its hooks, unless it is about to leave its
/// memory.
const TAKEN_OUT_AFTER: Duration = Duration::from_millis(500);

/// How often to check whether processes go on that keep their hooks because they were at rest.
const LOOK_AT_REST_AFTER: Duration = Duration::from_millis(200);

/// How long after the removal of its hooks a process's death may still be caused by them; and how long that is
/// remembered, because records arrive late.
const BLAMED_FOR_NS: u64 = 1_000_000_000;
const KNOWN_FOR_NS: u64 = 3 * BLAMED_FOR_NS;

/// Maximum number of processes to list because their own counts are impossible.
const MOST_DISTRUSTED: usize = 4096;

/// The counted processes.
pub(super) struct Counted {
    /// The kernel's list of processes. The kernel adds children to it.
    map: InlineMap,
    processes: HashMap<ProcessKey, Process>,
    /// Links by the process that was hooked. They serve its children, too.
    linked: HashMap<ProcessKey, Vec<Linked>>,
    /// The links of processes that have exited, or have lost their hooks.
    closing: Closing<InlineLinks>,
    /// Whether children are targets.
    follows: bool,
    /// Whether all calls have been sampled so far.
    samples_all: bool,
    /// Processes whose last counts could not be read.
    unread_ends: u64,
    /// Processes whose hooks were removed by something else.
    taken_out: u64,
    /// Processes that reported impossible counts.
    distrusted: HashSet<ProcessKey>,
    /// Children found since the last [`Self::take_heirs`].
    heirs: Vec<u32>,
    /// Our code in processes that no longer have it, and when it was removed (CLOCK_MONOTONIC), in order of time.
    taken_from: VecDeque<(u64, ProcessKey, FileKey, Arc<Ours>)>,
    /// Samples of ended processes that did not fit into the set in their process, by what bounds the set.
    sets_full: BTreeMap<SetBound, u64>,
    /// Processes that keep their hooks after [`Self::stop`] until they go on: they are frozen, or stopped by a signal.
    at_rest: HashSet<u32>,
    looked_at_rest: Instant,
}

/// An allocator in a process with our code, and the links to that code.
#[derive(Debug)]
pub(super) struct Linked {
    pub(super) pid: u32,
    pub(super) key: FileKey,
    pub(super) base: u64,
    /// The mapped code. It is locked as long as we live, so that others can tell.
    pub(super) text: File,
    pub(super) links: InlineLinks,
    pub(super) ours: Arc<Ours>,
    pub(super) set_bound: SetBound,
}

/// A counted process.
struct Process {
    /// Where the hooks of its allocators are.
    bases: Vec<u64>,
    /// Its memory, if it can be read. `None` after its end, or if it runs in another process's memory.
    memory: Option<File>,
    memory_of: ProcessKey,
    /// The process whose hooks it has: itself or an ancestor. `None` if its hooks were removed for a while.
    hooked: Option<ProcessKey>,
    /// Its counts from before that.
    before: Counts,
    /// Its counts as of the last two reads.
    counts: [Counts; 2],
    /// For each read, whether it had left its memory by then. If so, the counts are final.
    had_left: [bool; 2],
    /// Since when the counts have been unreadable although it is running.
    unread_since: Option<Instant>,
    /// Whether something else removed its hooks.
    was_taken_out: bool,
    /// Whether these are its own counts, made in another process's memory.
    counts_apart: bool,
    /// Sampled calls by exited processes that ran in its memory and whose own counts are not known.
    seen_of_others: KernelSampled,
    /// The known counts of other processes in its memory.
    of_others: Counts,
    /// Maximum CPU time that it can have used, and when that was determined (CLOCK_BOOTTIME), both in nanoseconds; and
    /// the CPU time of the exited processes in its memory.
    cpu_ns: (u64, u64),
    cpu_ns_of_others: u64,
    /// Whether its own counts are impossible. Then only what the kernel saw counts.
    is_distrusted: bool,
}

fn note_distrusted(distrusted: &mut HashSet<ProcessKey>, process: ProcessKey, it: &Process) {
    if it.is_distrusted && distrusted.len() < MOST_DISTRUSTED && distrusted.insert(process) {
        log::warn!("process {}: the counts in its memory are impossible; only its sampled calls count", process.tgid);
    }
}

fn bases(entry: &InlineProcess) -> Vec<u64> {
    entry.bases.into_iter().filter(|base| *base != 0).collect()
}

/// Lists a process that is stopped, before jumps are written to its allocator. Until it is stopped, it may end or fork
/// without hooks. Children that it forks from now on are listed by the fork.
pub(super) fn list(map: &InlineMap, process: ProcessKey, base: u64) -> Result<(), Refused> {
    let new = InlineProcess { memory_of: process, hooked: process, ..InlineProcess::default() };
    let mut entry = map.get(process).unwrap_or(new);
    let free = entry.bases.iter_mut().find(|base| **base == 0).ok_or(Refused::Allocators)?;
    *free = base;
    Ok(map.insert(process, &entry)?)
}

/// The listed processes that do not run in the memory of a `busy` one, which another thread may be stopping.
fn not_busy(entries: Vec<(ProcessKey, InlineProcess)>, busy: &HashSet<u32>) -> Vec<(ProcessKey, InlineProcess)> {
    entries.into_iter().filter(|(_, entry)| !busy.contains(&entry.memory_of.tgid)).collect()
}

/// Processes that have left their memory or lost their hooks, and are not among the `living`. `is_listed`: by the
/// kernel, which then reports their ends.
fn ended_unlisted(
    processes: &HashMap<ProcessKey, Process>,
    living: &HashSet<ProcessKey>,
    is_listed: impl Fn(ProcessKey) -> bool,
) -> Vec<ProcessKey> {
    let gone = processes.iter().filter(|(process, it)| it.has_left() && !living.contains(*process));
    gone.map(|(process, _)| *process).filter(|process| !is_listed(*process)).collect()
}

impl Process {
    fn new(process: ProcessKey, entry: &InlineProcess) -> Self {
        let own = entry.memory_of == process && entry.state != inline_state::LEFT;
        Self {
            bases: bases(entry),
            memory: own.then(|| memory::open(process.tgid).ok()).flatten(),
            memory_of: entry.memory_of,
            hooked: Some(entry.hooked),
            before: Counts::default(),
            counts: [Counts::default(); 2],
            had_left: [false; 2],
            unread_since: None,
            was_taken_out: false,
            counts_apart: false,
            seen_of_others: KernelSampled::default(),
            of_others: Counts::default(),
            cpu_ns: (0, process.start_ns),
            cpu_ns_of_others: 0,
            is_distrusted: false,
        }
    }

    /// Reads its current counts. `None` if they cannot be read, or are lower than before because something else has
    /// cleared them.
    fn now(&self) -> Option<Counts> {
        let memory = self.memory.as_ref()?;
        let mut counts = self.bases.iter().map(|base| memory::counts(memory, *base).ok());
        let now = counts.try_fold(self.before, |sum, counts| Some(figures::plus(&sum, &counts?)));
        now.filter(|now| now.threads >= self.counts[1].threads)
    }

    /// Keeps its counts as they are: its hooks are removed.
    fn loses_hooks(&mut self) {
        self.note_cpu_time(None);
        (self.memory, self.counts[0], self.had_left) = (None, self.counts[1], [true; 2]);
    }

    /// Lets its counts go on, if it has no hooks: it is hooked again.
    fn has_hooks_again(&mut self, process: ProcessKey) {
        if self.hooked.is_none() {
            (self.hooked, self.memory, self.before) = (Some(process), memory::open(process.tgid).ok(), self.counts[1]);
            (self.had_left, self.unread_since) = ([false; 2], None);
        }
    }

    /// Whether it has left its memory by an exit or an exec.
    const fn has_left(&self) -> bool {
        self.had_left[1]
    }

    /// Notes how much CPU time it can have used by now: the reading of its clock (`used`, in seconds), or otherwise the
    /// time since the last reading on all CPUs.
    fn note_cpu_time(&mut self, used: Option<f64>) {
        /// How far a process's clock can lag for each CPU that is running the process: the longest tick.
        const TICK_NS: u64 = 10_000_000;
        let late_ns = TICK_NS * online_processors() as u64;
        let now_ns = monotonic_ns() + suspended_ns();
        let since_ns = now_ns.saturating_sub(self.cpu_ns.1).saturating_mul(online_processors() as u64);
        let most_ns = used.map_or(self.cpu_ns.0.saturating_add(since_ns), |used| (used * 1e9) as u64 + late_ns);
        self.cpu_ns = (most_ns.max(self.cpu_ns.0), now_ns);
    }

    /// Takes over the counts that the kernel read when the process left its memory. Returns whether they are complete.
    fn leave(&mut self, entry: &InlineProcess) -> bool {
        self.memory = None;
        self.had_left[1] = true;
        self.note_cpu_time(None);
        if self.is_distrusted {
            return true;
        }
        let last = figures::plus(&self.before, &Counts::from(&entry.counts));
        // In a child, pages that it never touched are missing. Bytes cannot be compared, because a failed call takes
        // back what it requested.
        let is_complete = last.calls >= self.counts[1].calls;
        if is_complete {
            self.counts[1] = last;
        }
        is_complete
    }

    /// Returns what to add to the kernel's counters. These include `seen` of its sampled calls, and were read between
    /// the last two reads, or after its end (`has_ended`). `samples_all` says that all calls are sampled. `cpu_ns` is
    /// the CPU time of others that run in its memory. Impossible counts are ignored, permanently. `is_final` says that
    /// the kernel's counters were read some time after its end.
    fn addition(
        &mut self,
        (seen, cpu_ns): (KernelSampled, u64),
        has_ended: bool,
        samples_all: bool,
        is_final: bool,
    ) -> Counters {
        let mut seen_here = seen;
        seen_here.add(self.seen_of_others);
        let cpu_ns = [cpu_ns, self.cpu_ns.0, self.cpu_ns_of_others].into_iter().fold(0, u64::saturating_add);
        let mut own = self.counts.map(|counts| figures::minus(&counts, &self.of_others));
        // Before its end, samples may be in counters that were read a moment earlier.
        let seen = is_final.then_some(seen_here);
        self.is_distrusted |= !figures::are_possible(&own, cpu_ns, seen);
        if self.is_distrusted {
            own = [Counts::default(); 2];
        }
        let [before, now] = if samples_all { own.map(|counts| figures::of_every_call(&counts)) } else { own };
        if has_ended { figures::at_end(&now, seen_here) } else { figures::addition(&before, &now, seen_here) }
    }
}

impl Counted {
    /// Creates the state without any processes.
    pub(super) fn new(map: InlineMap, follows: bool) -> Self {
        Self {
            map,
            processes: HashMap::new(),
            linked: HashMap::new(),
            closing: Closing::default(),
            follows,
            samples_all: true,
            unread_ends: 0,
            taken_out: 0,
            distrusted: HashSet::new(),
            heirs: Vec::new(),
            taken_from: VecDeque::new(),
            sets_full: BTreeMap::new(),
            at_rest: HashSet::new(),
            looked_at_rest: Instant::now(),
        }
    }

    /// Notes a sampling interval that processes are about to use.
    pub(super) const fn will_sample(&mut self, interval_bytes: u64) {
        self.samples_all &= interval_bytes == 1;
    }

    /// The kernel's list, for [`list`] on another thread.
    pub(super) fn map(&self) -> InlineMap {
        self.map.clone()
    }

    /// Removes an allocator from the list, if it is there, because no jumps were written.
    pub(super) fn unlist(&mut self, process: ProcessKey, base: u64) {
        let Some(mut entry) = self.map.get(process).filter(|entry| entry.bases.contains(&base)) else { return };
        entry.bases.iter_mut().filter(|it| **it == base).for_each(|it| *it = 0);
        if entry.bases != [0; MAX_ALLOCATORS] {
            // If this fails, the base stays in the list, and its counts read as zeros.
            let _ = self.map.insert(process, &entry);
            return;
        }
        self.map.remove(process);
        for (child, _) in self.map.entries().into_iter().filter(|(_, entry)| entry.hooked == process) {
            self.map.remove(child);
        }
    }

    /// Adds a process that was hooked.
    pub(super) fn add(&mut self, process: ProcessKey, linked: Linked) {
        if let Some(entry) = self.map.get(process) {
            let known = self.processes.entry(process).or_insert_with(|| Process::new(process, &entry));
            known.has_hooks_again(process);
            known.bases = bases(&entry);
        }
        self.linked.entry(process).or_default().push(linked);
    }

    /// Closes the links to an allocator in a process that has ended before it was hooked.
    pub(super) fn close(&mut self, linked: Linked) {
        self.closing.close(linked.links);
    }

    /// The hooked allocators of a process.
    pub(super) fn linked(&self, pid: u32) -> impl Iterator<Item = &Linked> {
        self.linked.values().flatten().filter(move |linked| linked.pid == pid)
    }

    /// Whether this process generation is still running with its hooks.
    pub(super) fn runs(&self, process: ProcessKey) -> bool {
        self.map.get(process).is_some_and(|entry| entry.state != inline_state::LEFT)
    }

    /// All such generations. Reads the kernel's whole list, which takes less than asking for a few hundred of them.
    pub(super) fn all_that_run(&self) -> HashSet<ProcessKey> {
        let running = self.map.entries().into_iter().filter(|(_, entry)| entry.state != inline_state::LEFT);
        running.map(|(process, _)| process).collect()
    }

    /// Whether another process has the hooks that were made in this one.
    pub(super) fn has_heirs(&self, process: ProcessKey) -> bool {
        self.processes.iter().any(|(other, it)| *other != process && it.hooked == Some(process))
    }

    /// Whether a process began with inherited hooks. Reads the kernel's whole list.
    pub(super) fn has_inherited(&self, pid: u32) -> bool {
        self.all_heirs().contains(&pid)
    }

    /// The processes that began with inherited hooks. Reads the kernel's whole list.
    pub(super) fn all_heirs(&self) -> HashSet<u32> {
        let heirs = self.map.entries().into_iter().filter(|(process, entry)| entry.hooked != *process);
        heirs.map(|(process, _)| process.tgid).collect()
    }

    /// Whether this process generation has inherited hooks.
    pub(super) fn is_child(&self, process: ProcessKey) -> bool {
        self.map.get(process).is_some_and(|entry| entry.hooked != process)
    }

    /// Whether its own or inherited hooks are those of an allocator in this file.
    pub(super) fn has_hooks_of(&self, process: ProcessKey, key: FileKey) -> bool {
        let hooked = self.map.get(process).map(|entry| entry.hooked);
        let linked = hooked.and_then(|hooked| self.linked.get(&hooked));
        linked.is_some_and(|linked| linked.iter().any(|linked| linked.key == key))
    }

    /// Finds new children, and processes that have left their memory.
    pub(super) fn look(&mut self) {
        let mut entries = self.map.entries();
        // Processes that run in another's memory come after that process.
        entries.sort_by_key(|(process, entry)| entry.memory_of != *process);
        for (process, entry) in entries {
            let is_child = entry.hooked != process;
            if is_child && !self.follows {
                let is_over = entry.state == inline_state::LEFT;
                if entry.memory_of == process {
                    self.let_go(process, &entry);
                } else if is_over {
                    self.take_from_owner(&entry);
                    self.map.remove(process);
                }
                continue;
            }
            if is_child && entry.state != inline_state::LEFT && !self.processes.contains_key(&process) {
                self.heirs.push(process.tgid);
            }
            let known = self.processes.entry(process).or_insert_with(|| Process::new(process, &entry));
            if entry.state != inline_state::LEFT || known.has_left() {
                continue;
            }
            if known.memory_of != process {
                known.had_left[1] = true;
                known.note_cpu_time(None);
                if let Some(counted) = self.take_from_owner(&entry)
                    && let Some(known) = self.processes.get_mut(&process)
                {
                    (known.counts_apart, known.counts[1]) = (true, counted);
                }
            } else if !known.leave(&entry) && !known.was_taken_out {
                self.unread_ends += 1;
                log::warn!("process {}: its last counts were read only in part; totals may be too small", process.tgid);
            }
        }
    }

    /// Subtracts what a process counted in another's memory, according to the kernel, from that other process. `None`
    /// if it is not known or the other process has been forgotten; then nothing is subtracted.
    fn take_from_owner(&mut self, entry: &InlineProcess) -> Option<Counts> {
        let counted = (entry.unread_pages != 0).then(|| Counts::from(&entry.counts))?;
        let owner = self.processes.get_mut(&entry.memory_of)?;
        owner.of_others = figures::plus(&owner.of_others, &counted);
        // The last read may contain only part of it.
        if !owner.has_left() {
            owner.counts[1] = owner.now().unwrap_or(owner.counts[1]);
        }
        Some(counted)
    }

    /// Returns the PIDs of children that were found with their parents' hooks since the last call.
    pub(super) fn take_heirs(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.heirs)
    }

    /// Removes the hooks from a child that is not a target. If that is not possible now, the next [`Self::look`] tries
    /// again.
    fn let_go(&mut self, process: ProcessKey, entry: &InlineProcess) {
        let has_them = entry.state != inline_state::LEFT && entry.memory_of == process;
        if !has_them || take_out_at(process.tgid, &bases(entry)) {
            self.has_lost_hooks(process, entry);
        }
    }

    /// Notes that hooks were removed from a process. It had to be listed up to now, so that its children are, too.
    fn has_lost_hooks(&mut self, process: ProcessKey, entry: &InlineProcess) {
        for (key, ours) in self.made_in(entry.hooked).collect::<Vec<_>>() {
            self.note_taken_from(process, key, ours);
        }
        self.map.remove(process);
    }

    /// Removes the hooks from an idle process until it is hooked again, and keeps its counts. Returns whether that was
    /// possible now.
    pub(super) fn pause(&mut self, process: ProcessKey) -> bool {
        let Some(entry) = self.map.get(process) else { return false };
        let Some(known) = self.processes.get_mut(&process).filter(|known| !known.has_left()) else { return false };
        if entry.memory_of != process || entry.state == inline_state::LEFT {
            return false;
        }
        known.counts[1] = known.now().unwrap_or(known.counts[1]);
        known.note_cpu_time(cpu_seconds_of(process.tgid));
        if !take_out_at(process.tgid, &bases(&entry)) {
            return false;
        }
        known.loses_hooks();
        known.hooked = None;
        self.has_lost_hooks(process, &entry);
        // It may have forked in the meantime: before the removal, or after it, without hooks.
        self.unlist_without_hooks(entry.hooked);
        self.look();
        // At once: if it is hooked again, the same code gets new links.
        InlineLinks::close(self.take_unused(entry.hooked).into_iter().map(|linked| linked.links));
        true
    }

    /// Removes unknown children from the list that run without the hooks which were made in `hooked`.
    fn unlist_without_hooks(&mut self, hooked: ProcessKey) {
        let runs = |it: &InlineProcess| it.hooked == hooked && it.state == inline_state::RUNS;
        for (child, it) in self.map.entries() {
            let is_new = runs(&it) && it.memory_of == child && !self.processes.contains_key(&child);
            // If it leaves its memory meanwhile, its counts have been read.
            if is_new && !leads_to_ours(child.tgid) && self.map.get(child).is_some_and(|it| runs(&it)) {
                self.map.remove(child);
            }
        }
    }

    /// Returns what was linked for a process, if no process has its hooks any more.
    fn take_unused(&mut self, hooked: ProcessKey) -> Vec<Linked> {
        let is_used = self.processes.values().any(|other| other.hooked == Some(hooked));
        if is_used { Vec::new() } else { self.linked.remove(&hooked).unwrap_or_default() }
    }

    /// Our code in a process that has the hooks which were made in `hooked`.
    fn made_in(&self, hooked: ProcessKey) -> impl Iterator<Item = (FileKey, Arc<Ours>)> {
        let linked = self.linked.get(&hooked).into_iter().flatten();
        linked.map(|linked| (linked.key, Arc::clone(&linked.ours)))
    }

    /// Notes that this code is no longer in a process.
    pub(super) fn note_taken_from(&mut self, process: ProcessKey, key: FileKey, ours: Arc<Ours>) {
        let now_ns = monotonic_ns();
        while self.taken_from.pop_front_if(|(at_ns, ..)| *at_ns + KNOWN_FOR_NS < now_ns).is_some() {}
        self.taken_from.push_back((now_ns, process, key, ours));
    }

    /// Our code that was in a process at a time (CLOCK_MONOTONIC), or shortly before.
    pub(super) fn ours_in(&self, process: ProcessKey, time_ns: u64) -> Vec<(FileKey, Arc<Ours>)> {
        let has = self.map.get(process).into_iter().flat_map(|entry| self.made_in(entry.hooked));
        let had = self.taken_from.iter().filter(|(at_ns, of, ..)| *of == process && time_ns < at_ns + BLAMED_FOR_NS);
        has.chain(had.map(|(_, _, key, ours)| (*key, Arc::clone(ours)))).collect()
    }

    /// Reads the counts of all processes. Must be called before and after the kernel's counters are read.
    pub(super) fn read(&mut self) {
        for (key, process) in &mut self.processes {
            process.had_left[0] = process.had_left[1];
            if process.has_left() {
                process.counts[0] = process.counts[1];
                continue;
            }
            // Processes that end between this and the scan of the list are found by the next read.
            let now = process.now();
            let runs = now.is_some() || process.memory.is_none();
            // Read after the counts, so that it covers the time that these took.
            process.note_cpu_time(runs.then(|| cpu_seconds_of(key.tgid)).flatten());
            process.is_distrusted |= now.is_some_and(|now| now.calls < process.counts[1].calls);
            if now.is_some() || process.memory.is_none() {
                process.unread_since = None;
            } else {
                process.unread_since.get_or_insert_with(Instant::now);
            }
            process.counts = [process.counts[1], now.unwrap_or(process.counts[1])];
        }
        self.look();
        self.find_taken_out();
        let is_new = |process: &&mut Process| !process.has_left() && process.counts[1].threads == 0;
        for process in self.processes.values_mut().filter(is_new) {
            process.counts[1] = process.now().unwrap_or(process.counts[1]);
            process.note_cpu_time(None);
        }
    }

    /// Finds processes that keep running without their hooks.
    fn find_taken_out(&mut self) {
        let is_unread = |it: &&mut Process| it.unread_since.is_some_and(|since| since.elapsed() >= TAKEN_OUT_AFTER);
        for (process, known) in &mut self.processes {
            if known.has_left() || known.was_taken_out || !is_unread(&known) || leads_to_ours(process.tgid) {
                continue;
            }
            known.was_taken_out = true;
            self.taken_out += 1;
            log::warn!(
                "process {}: another tool removed its inline hooks; calls since then may be missing",
                process.tgid
            );
        }
    }

    /// Every process that can be read, with its memory and the address of each allocator's hooks.
    pub(super) fn memories(&self) -> impl Iterator<Item = (ProcessKey, &File, u64)> {
        let readable = self.processes.iter().filter_map(|(process, it)| Some((*process, it, it.memory.as_ref()?)));
        readable.flat_map(|(process, it, memory)| it.bases.iter().map(move |base| (process, memory, *base)))
    }

    /// Adds the counts of all processes to the kernel's counters.
    pub(super) fn add_to(&mut self, counts: &mut totals::Counts) {
        // The memory of a process contains the counts of all processes that run in it.
        let mut seen: HashMap<ProcessKey, (KernelSampled, u64)> = HashMap::new();
        let is_apart = |process: &ProcessKey, it: &Process| it.memory_of == *process || it.counts_apart;
        for (process, it) in &self.processes {
            let own = counts.processes.get(process).map(KernelSampled::of).unwrap_or_default();
            let counted_as = if is_apart(process, it) { *process } else { it.memory_of };
            let (seen, cpu_ns) = seen.entry(counted_as).or_default();
            seen.add(own);
            *cpu_ns = cpu_ns.saturating_add(if counted_as == *process { 0 } else { it.cpu_ns.0 });
        }
        for (process, it) in self.processes.iter_mut().filter(|(process, it)| is_apart(process, it)) {
            let seen = seen.get(process).copied().unwrap_or_default();
            // A process that ended between the two reads made its last calls after the kernel's counters were read.
            let added = it.addition(seen, it.had_left[0], self.samples_all, false);
            note_distrusted(&mut self.distrusted, *process, it);
            if added != Counters::default() {
                counts.processes.entry(*process).or_default().add(&added);
            }
        }
    }

    /// Forgets a process that had ended at the last [`Self::look`]. `kernel` are its counts in the kernel. Returns what
    /// it has counted in addition.
    pub(super) fn take(&mut self, process: ProcessKey, kernel: &Counters) -> Counters {
        self.map.remove(process);
        let Some(mut it) = self.processes.remove(&process) else { return Counters::default() };
        if let Some(bound) = self.set_bound(&it).filter(|_| kernel.set_full > 0) {
            *self.sets_full.entry(bound).or_default() += kernel.set_full;
        }
        let unused = it.hooked.map(|hooked| self.take_unused(hooked));
        unused.into_iter().flatten().for_each(|linked| self.closing.close(linked.links));
        if it.memory_of != process && !it.counts_apart {
            if let Some(owner) = self.processes.get_mut(&it.memory_of) {
                owner.seen_of_others.add(KernelSampled::of(kernel));
                owner.cpu_ns_of_others = owner.cpu_ns_of_others.saturating_add(it.cpu_ns.0);
            }
            return Counters::default();
        }
        if !it.has_left() {
            self.unread_ends += 1;
            log::warn!("process {}: its last counts were not read; totals may be too small", process.tgid);
        }
        let added = it.addition((KernelSampled::of(kernel), 0), it.has_left(), self.samples_all, true);
        note_distrusted(&mut self.distrusted, process, &it);
        added
    }

    /// What bounds the set of sampled blocks in a process; `None` without hooks. All of its allocators have most likely
    /// the same bound.
    fn set_bound(&self, it: &Process) -> Option<SetBound> {
        self.linked.get(&it.hooked?)?.first().map(|linked| linked.set_bound)
    }

    /// Samples that did not fit into the set in their process, by what bounds the set. `counts`: of the processes that
    /// have not been taken.
    pub(super) fn sets_full(&self, counts: &totals::Counts) -> BTreeMap<SetBound, u64> {
        let mut full = self.sets_full.clone();
        for (process, counters) in counts.processes.iter().filter(|(_, counters)| counters.set_full > 0) {
            if let Some(bound) = self.processes.get(process).and_then(|it| self.set_bound(it)) {
                *full.entry(bound).or_default() += counters.set_full;
            }
        }
        full
    }

    /// Processes that reported impossible counts. Only their sampled calls are in their totals.
    pub(super) const fn distrusted(&self) -> &HashSet<ProcessKey> {
        &self.distrusted
    }

    /// Those of them that are still being read.
    pub(super) fn distrusted_now(&self) -> impl Iterator<Item = ProcessKey> {
        self.distrusted.iter().copied().filter(|process| self.processes.contains_key(process))
    }

    /// Processes whose last counts could not be read. Their totals are too small.
    pub(super) const fn unread_ends(&self) -> u64 {
        self.unread_ends
    }

    /// Processes whose hooks something else removed. Their totals are too small.
    pub(super) const fn taken_out(&self) -> u64 {
        self.taken_out
    }

    /// Processes that are not among the `living`, and whose ends the kernel may not report, because they had lost their
    /// hooks before.
    pub(super) fn ended_unlisted(&self, living: &HashSet<ProcessKey>) -> Vec<ProcessKey> {
        ended_unlisted(&self.processes, living, |process| self.map.get(process).is_some())
    }

    /// Whether any code has links.
    pub(super) fn has_links(&self) -> bool {
        !self.linked.is_empty()
    }

    /// Removes the hooks from all processes that are not `busy`, and keeps the counts of all, which must be read
    /// before. Processes at rest keep their hooks for now. Returns the processes that had hooks.
    pub(super) fn stop(&mut self, busy: &HashSet<u32>) -> Vec<ProcessKey> {
        let mut entries = self.map.entries();
        entries.retain(|(_, entry)| entry.state != inline_state::LEFT);
        let ours = entries.iter().flat_map(|(process, entry)| self.made_in(entry.hooked).map(|it| (*process, it)));
        let ours: Vec<_> = ours.collect();
        self.processes.values_mut().filter(|known| !known.has_left()).for_each(Process::loses_hooks);
        self.at_rest = self.take_all_out(busy.clone(), false);
        self.looked_at_rest = Instant::now();
        ours.into_iter().for_each(|(process, (key, ours))| self.note_taken_from(process, key, ours));
        entries.into_iter().map(|(process, _)| process).collect()
    }

    /// Number of processes that keep their hooks until they go on.
    pub(super) fn at_rest(&self) -> usize {
        self.at_rest.len()
    }

    /// Whether one of them goes on, or has ended. Looked at a few times a second.
    pub(super) fn has_any_gone_on(&mut self) -> bool {
        if self.at_rest.is_empty() || self.looked_at_rest.elapsed() < LOOK_AT_REST_AFTER {
            return false;
        }
        self.looked_at_rest = Instant::now();
        !self.at_rest.iter().all(|pid| limits::is_at_rest(*pid))
    }

    /// Removes the hooks from all processes, and forgets the processes.
    pub(super) fn release_all(&mut self) {
        self.take_all_out(HashSet::new(), true);
        self.processes.clear();
    }

    /// Removes the hooks from all processes that are not `busy`. Waits for processes that are frozen only if it
    /// `is_last`. Otherwise they, and those that a signal stopped, keep their hooks and are returned.
    fn take_all_out(&mut self, mut busy: HashSet<u32>, is_last: bool) -> HashSet<u32> {
        // Hooks without a lock may be removed.
        self.linked.values().flatten().for_each(|linked| drop(linked.text.unlock()));
        let (mut done, mut at_rest) = (HashSet::new(), HashSet::<u32>::new());
        for _ in 0..ROUNDS {
            let entries = not_busy(self.map.entries(), &busy);
            if entries.is_empty() {
                break;
            }
            let have_them = entries.iter().filter(|(process, entry)| {
                entry.state != inline_state::LEFT && entry.memory_of == *process && done.insert(*process)
            });
            // As long as processes have the hooks, they must be listed, so that their children are listed, too. A
            // process that cannot be stopped now does not delay the others.
            let pids: Vec<u32> = have_them.map(|(process, _)| process.tgid).collect();
            let still = Mutex::new(Vec::new());
            on_all_processors(pids, |pid| {
                if !take_out_now(pid) {
                    still.lock().unwrap_or_else(PoisonError::into_inner).push(pid);
                }
            });
            let (still, since) = (still.into_inner().unwrap_or_else(PoisonError::into_inner), Instant::now());
            let resting = Mutex::new(HashSet::new());
            on_all_processors(still, |pid| {
                if is_last {
                    take_out_since(pid, since);
                } else if !take_out_unless_at_rest(pid) {
                    log::info!("process {pid} is frozen or stopped: it keeps its inline hooks until it goes on");
                    resting.lock().unwrap_or_else(PoisonError::into_inner).insert(pid);
                }
            });
            at_rest.extend(resting.into_inner().unwrap_or_else(PoisonError::into_inner));
            busy.extend(&at_rest);
            not_busy(entries, &busy).iter().for_each(|(process, _)| self.map.remove(*process));
        }
        let unused = self.linked.extract_if(|hooked, _| !busy.contains(&hooked.tgid));
        unused.flat_map(|(_, linked)| linked).for_each(|linked| self.closing.close(linked.links));
        at_rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process whose last read happened during a call that then failed.
    #[test]
    fn a_call_that_fails_after_the_last_read_is_in_no_figure() {
        let process = ProcessKey { tgid: 1, ..ProcessKey::default() };
        let mut entry = InlineProcess { state: inline_state::LEFT, memory_of: process, ..InlineProcess::default() };
        let mut known = Process::new(process, &entry);
        let before =
            Counts { calls: 3, bytes: (1 << 46) + 200, sampled: 2, reported: 2, threads: 1, ..Counts::default() };
        known.counts = [before; 2];
        (entry.counts.calls, entry.counts.bytes, entry.counts.failed) = (3, 200, 1);
        assert!(known.leave(&entry));
        assert_eq!((known.counts[1].bytes, known.counts[1].failed), (200, 1));
        entry.counts.calls = 2;
        assert!(!known.leave(&entry), "a part of it was not read");
    }

    #[test]
    fn counts_of_a_process_that_is_hooked_again_go_on_where_they_were() {
        let process = ProcessKey { tgid: u32::MAX, ..ProcessKey::default() };
        let mut entry = InlineProcess { state: inline_state::LEFT, memory_of: process, ..InlineProcess::default() };
        let mut known = Process::new(process, &entry);
        let counts = |calls| Counts { calls, bytes: 100 * calls, threads: 1, ..Counts::default() };
        known.counts = [counts(2), counts(3)];
        known.loses_hooks();
        known.hooked = None;
        assert_eq!((known.counts, known.has_left()), ([counts(3); 2], true));
        known.has_hooks_again(process);
        assert!(!known.has_left() && known.hooked == Some(process));
        // The new hooks count from zero.
        (entry.counts.calls, entry.counts.bytes) = (4, 400);
        assert!(known.leave(&entry));
        assert_eq!((known.counts[1].calls, known.counts[1].bytes), (7, 700));
    }

    fn process(tgid: u32) -> ProcessKey {
        ProcessKey { tgid, ..ProcessKey::default() }
    }

    #[test]
    fn whoever_is_being_stopped_keeps_its_hooks_for_now_with_all_in_its_memory() {
        let entry = |of: u32, memory_of: u32| {
            let (memory_of, hooked) = (process(memory_of), process(1));
            (process(of), InlineProcess { memory_of, hooked, ..InlineProcess::default() })
        };
        let all = || vec![entry(1, 1), entry(2, 1), entry(3, 3), entry(4, 4)];
        let left = |busy: &[u32]| -> Vec<u32> {
            not_busy(all(), &busy.iter().copied().collect()).iter().map(|(process, _)| process.tgid).collect()
        };
        assert_eq!((left(&[]), left(&[1]), left(&[3, 9])), (vec![1, 2, 3, 4], vec![3, 4], vec![1, 2, 4]));
    }

    /// A process that is let go is taken off the kernel's list. If it had no sample, nothing reports its end.
    #[test]
    fn processes_that_end_without_their_hooks_are_found() {
        let entry = InlineProcess { state: inline_state::LEFT, ..InlineProcess::default() };
        let known = |tgid| (process(tgid), Process::new(process(tgid), &entry));
        let mut processes: HashMap<_, _> = (1..=4).map(known).collect();
        processes.values_mut().for_each(Process::loses_hooks);
        processes.extend([known(5)]);
        let executed = ProcessKey { exec_id: 1, ..process(2) };
        let living = HashSet::from([process(1), executed]);
        let mut gone = ended_unlisted(&processes, &living, |process| process.tgid == 4);
        gone.sort_unstable();
        // 1 runs, 4 is listed, 5 has not been found to have left its memory.
        assert_eq!(gone, [process(2), process(3)]);
    }
}
