//! The processes that inline hooks count: those that were hooked, and children that inherited the hooks.

mod process;
mod stop;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use heapbpf_host::clock::{cpu_seconds_of, monotonic_ns};
use heapbpf_inline::read::Counts;
use heapbpf_kernel::inline::{InlineLinks, InlineMap};
use heapbpf_kernel::totals;
use sampler_ebpf::abi::inline::{InlineProcess, MAX_ALLOCATORS, inline_state};
use sampler_ebpf::abi::{Counters, ProcessKey};

use self::process::{Process, bases};
use super::control::SetBound;
use super::crashes::Ours;
use super::figures::{self, KernelSampled};
use super::may_be_hooked::Refused;
use super::removal::{leads_to_ours, take_out_at};
use crate::closing::Closing;
use crate::files::FileKey;

/// A process whose counts have been unreadable for this long runs without its hooks, unless it is about to leave its
/// memory.
const TAKEN_OUT_AFTER: Duration = Duration::from_millis(500);

/// How long after the removal of its hooks a process's death may still be caused by them; and how long that is
/// remembered, because records arrive late.
const BLAMED_FOR_NS: u64 = 1_000_000_000;
const KNOWN_FOR_NS: u64 = 3 * BLAMED_FOR_NS;

/// Maximum number of processes to list because their own counts are impossible.
const MOST_DISTRUSTED: usize = 4096;

/// The counted processes.
pub struct Counted {
    /// The kernel's list of processes. The kernel adds children to it.
    pub(super) map: InlineMap,
    processes: HashMap<ProcessKey, Process>,
    /// Links by the process that was hooked. They serve its children, too.
    pub(super) linked: HashMap<ProcessKey, Vec<Linked>>,
    /// The links of processes that have exited, or have lost their hooks.
    pub(super) closing: Closing<InlineLinks>,
    /// Whether children are targets.
    follows: bool,
    /// Whether all calls have been sampled so far.
    samples_all: bool,
    /// Processes whose last counts could not be read.
    unread_ends: u64,
    /// Processes whose hooks were removed by something else.
    taken_out: u64,
    /// Processes that reported impossible counts. Only their sampled calls are in their totals.
    pub distrusted: HashSet<ProcessKey>,
    /// Children with their parents' hooks that were found since somebody last took this list.
    pub(super) heirs: Vec<u32>,
    /// Our code in processes that no longer have it, and when it was removed (CLOCK_MONOTONIC), in order of time.
    taken_from: VecDeque<(u64, ProcessKey, FileKey, Arc<Ours>)>,
    /// Samples of ended processes that did not fit into the set in their process, by what bounds the set.
    sets_full: BTreeMap<SetBound, u64>,
    /// Processes that keep their hooks until they continue, although all hooks are being removed: they are frozen, or
    /// stopped by a signal.
    pub at_rest: HashSet<u32>,
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

fn note_distrusted(distrusted: &mut HashSet<ProcessKey>, process: ProcessKey, it: &Process) {
    if it.is_distrusted && distrusted.len() < MOST_DISTRUSTED && distrusted.insert(process) {
        log::warn!("process {}: the counts in its memory are impossible; only its sampled calls count", process.tgid);
    }
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

impl Counted {
    /// Creates the state without any processes.
    pub(super) fn new(map: InlineMap, follows: bool) -> Self {
        Self {
            map,
            processes: HashMap::new(),
            linked: HashMap::new(),
            closing: Closing::new(InlineLinks::close),
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

    /// Removes an allocator from the list, if it is there, because no jumps were written.
    pub(super) fn unlist(&mut self, process: ProcessKey, base: u64) {
        let Some(mut entry) = self.map.get(process).filter(|entry| entry.bases.contains(&base)) else { return };
        entry.bases.iter_mut().filter(|it| **it == base).for_each(|it| *it = 0);
        if entry.bases != [0; MAX_ALLOCATORS] {
            // If this fails, the base stays in the list, and nothing of the process is believed.
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

    /// The hooked allocators of a process.
    pub(super) fn linked(&self, pid: u32) -> impl Iterator<Item = &Linked> {
        self.linked.values().flatten().filter(move |linked| linked.pid == pid)
    }

    /// Whether this process generation is still running with its hooks.
    pub fn runs(&self, process: ProcessKey) -> bool {
        self.map.get(process).is_some_and(|entry| entry.state != inline_state::LEFT)
    }

    /// Whether another process has the hooks that were made in this one.
    pub fn has_heirs(&self, process: ProcessKey) -> bool {
        self.processes.iter().any(|(other, it)| *other != process && it.hooked == Some(process))
    }

    /// The processes that began with inherited hooks. Reads the kernel's whole list.
    pub fn all_heirs(&self) -> HashSet<u32> {
        let heirs = self.map.entries().into_iter().filter(|(process, entry)| entry.hooked != *process);
        heirs.map(|(process, _)| process.tgid).collect()
    }

    /// Whether this process generation has inherited hooks.
    pub fn is_child(&self, process: ProcessKey) -> bool {
        self.map.get(process).is_some_and(|entry| entry.hooked != process)
    }

    /// Whether its own or inherited hooks are those of an allocator in this file.
    pub(super) fn has_hooks_of(&self, process: ProcessKey, key: FileKey) -> bool {
        let hooked = self.map.get(process).map(|entry| entry.hooked);
        let linked = hooked.and_then(|hooked| self.linked.get(&hooked));
        linked.is_some_and(|linked| linked.iter().any(|linked| linked.key == key))
    }

    /// Finds new children, and processes that have left their memory. Reads the kernel's whole list. Returns those that
    /// run with their hooks, without children that are no targets.
    pub(super) fn look(&mut self) -> Vec<ProcessKey> {
        let mut running = Vec::new();
        let mut entries = self.map.entries();
        // Processes that run in another's memory come after that process.
        entries.sort_by_key(|(process, entry)| entry.memory_of != *process);
        for (process, entry) in entries {
            let is_child = entry.hooked != process;
            if is_child && !self.follows {
                if entry.memory_of == process {
                    self.let_go(process, &entry);
                } else if entry.state == inline_state::LEFT {
                    self.take_from_owner(&entry);
                    self.map.remove(process);
                }
                continue;
            }
            if is_child && entry.state != inline_state::LEFT && !self.processes.contains_key(&process) {
                self.heirs.push(process.tgid);
            }
            let known = self.processes.entry(process).or_insert_with(|| Process::new(process, &entry));
            if entry.state != inline_state::LEFT {
                running.push(process);
                continue;
            }
            if known.has_left() {
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
        running
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

    /// Removes the hooks from a child that is not a target. If that is not possible now, the next [`Self::look`] tries
    /// again.
    fn let_go(&mut self, process: ProcessKey, entry: &InlineProcess) {
        if entry.state == inline_state::LEFT || take_out_at(process.tgid, &bases(entry)) {
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
    pub fn read(&mut self) {
        for (key, process) in &mut self.processes {
            process.had_left[0] = process.had_left[1];
            if process.has_left() {
                process.counts[0] = process.counts[1];
                continue;
            }
            // Processes that end between this and the scan of the list are found by the next read.
            let now = process.now();
            let is_invalid = now.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::InvalidData);
            let now = now.ok();
            // Whoever removes hooks empties the counts when no jump leads to them any more. Before, only their owner can
            // have written there.
            process.is_distrusted |= is_invalid && !process.was_taken_out && leads_to_ours(key.tgid);
            let runs = now.is_some() || process.memory.is_none();
            // Read after the counts, so that it covers the time that these took.
            process.note_cpu_time(runs.then(|| cpu_seconds_of(key.tgid)).flatten());
            process.is_distrusted |= now.is_some_and(|now| now.calls < process.counts[1].calls);
            process.unread_since = if runs { None } else { process.unread_since.or_else(|| Some(Instant::now())) };
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
            if known.has_left()
                || known.was_taken_out
                || known.is_distrusted
                || !is_unread(&known)
                || leads_to_ours(process.tgid)
            {
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
    pub fn add_to(&mut self, counts: &mut totals::Counts) {
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
    pub fn sets_full(&self, counts: &totals::Counts) -> BTreeMap<SetBound, u64> {
        let mut full = self.sets_full.clone();
        for (process, counters) in counts.processes.iter().filter(|(_, counters)| counters.set_full > 0) {
            if let Some(bound) = self.processes.get(process).and_then(|it| self.set_bound(it)) {
                *full.entry(bound).or_default() += counters.set_full;
            }
        }
        full
    }

    /// Processes that reported impossible counts and are still being read.
    pub fn distrusted_now(&self) -> impl Iterator<Item = ProcessKey> {
        self.distrusted.iter().copied().filter(|process| self.processes.contains_key(process))
    }

    /// Number of processes with uncounted calls: at their end, because something else removed the hooks, or because
    /// they reported impossible counts.
    pub fn incomplete(&self) -> u64 {
        self.unread_ends + self.taken_out + self.distrusted.len() as u64
    }

    /// Processes that are not among the `living`, and whose ends the kernel may not report, because they had lost their
    /// hooks before.
    pub(super) fn ended_unlisted(&self, living: &HashSet<ProcessKey>) -> Vec<ProcessKey> {
        ended_unlisted(&self.processes, living, |process| self.map.get(process).is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(tgid: u32) -> ProcessKey {
        ProcessKey { tgid, ..ProcessKey::default() }
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
