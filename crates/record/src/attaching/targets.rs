//! The profiled processes, and since when their allocators have been hooked. Each process's coverage is computed from
//! this.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::PoisonError;

use heapbpf_profile::model::Resident;

use super::arenas::{AtAttach, InUse, InUseByProcess, ResidentAt};

/// Age at which the resident memory of a process that began during the recording is read for the first time, ns; and
/// maximum number of processes that wait for it.
const FIRST_READ_NS: u64 = 1_000_000_000;
const MOST_UNREAD: usize = 1 << 12;
/// Maximum number of processes whose memory is read at once.
const MOST_READ: usize = 64;

/// The time for which a process had inline hooks of another heapbpf, so that probes saw nothing of it. It is known to
/// within the time between two checks of the process's mappings, and is overestimated rather than underestimated.
#[derive(Clone, Copy, Debug, Default)]
struct Unseen {
    /// Total, ns, without the time since `since_ns`.
    ns: u64,
    /// Since when the process has such hooks (CLOCK_MONOTONIC), if it has.
    since_ns: Option<u64>,
    /// When a check last found the hooks gone (CLOCK_MONOTONIC).
    until_ns: Option<u64>,
}

impl Unseen {
    /// Whether the process was ever unseen.
    const fn was(&self) -> bool {
        self.since_ns.is_some() || self.until_ns.is_some()
    }

    /// Nanoseconds up to a given time.
    fn up_to(&self, ns: u64) -> u64 {
        self.ns.saturating_add(self.since_ns.map_or(0, |since| ns.saturating_sub(since)))
    }
}

/// How much was seen of a process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ObservedShare {
    /// Share of its time in the recording during which its allocators were hooked and its calls were seen.
    pub share: f64,
    /// Whether another heapbpf had hooked it inline for a while.
    pub was_hidden: bool,
}

impl ObservedShare {
    /// Nothing was missed.
    pub const WHOLE: Self = Self { share: 1.0, was_hidden: false };
}

/// CPU time of a process that was forked before links served it.
#[derive(Clone, Copy, Debug)]
struct Late {
    /// [`Coverage::since_ns`] of the program that was forked.
    since_ns: u64,
    /// Until links served it, ns; `None` if it ended before.
    missed_ns: Option<u64>,
    /// In all, ns, if it has ended.
    all_ns: Option<u64>,
}

impl Late {
    /// How much of this CPU time was counted, ns.
    fn counted_ns(&self, all_ns: u64) -> u64 {
        self.missed_ns.map_or(0, |missed_ns| all_ns.saturating_sub(missed_ns))
    }
}

/// Processes that were forked before links served them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LateForks {
    /// Their number.
    pub processes: u64,
    /// Their CPU time, ns.
    pub all_ns: u64,
    /// The part of it in which their calls were counted, ns.
    pub counted_ns: u64,
}

impl LateForks {
    fn add(&mut self, late: &Late, all_ns: u64) {
        self.processes += 1;
        self.all_ns = self.all_ns.saturating_add(all_ns);
        self.counted_ns = self.counted_ns.saturating_add(late.counted_ns(all_ns));
    }
}

/// Coverage of a target process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Coverage {
    /// Nanoseconds of the recording during which one of the process's allocators was not hooked yet.
    pub uncovered_ns: u64,
    /// CLOCK_MONOTONIC when the last such gap ended.
    gap_until_ns: u64,
    /// CLOCK_MONOTONIC when the process joined the recording.
    pub since_ns: u64,
    /// CLOCK_MONOTONIC when the process ended.
    pub until_ns: Option<u64>,
    /// Whether an allocator is hooked in the process.
    pub hooked: bool,
    /// Whether the process is unobserved until an allocator is hooked, because the previous program had hooks of its
    /// own.
    awaits_hook: bool,
    /// Private anonymous memory that was resident or swapped out when the process joined the recording, bytes; `None` if
    /// unknown.
    pub at_attach_bytes: Option<u64>,
    /// All of its resident memory when that was first read: when the process joined the recording, or soon after it
    /// began. `None` if it was not read.
    first_resident: Option<ResidentAt>,
    /// When probes did not see it.
    unseen: Unseen,
    /// Set if it was forked before links served it.
    late: Option<Late>,
    /// CLOCK_MONOTONIC when its own links, or its inline hooks, were detached for good.
    given_up_ns: Option<u64>,
    /// CLOCK_MONOTONIC when they were detached until it is active again.
    let_go_ns: Option<u64>,
    /// CLOCK_MONOTONIC when it was hooked again after that.
    again_ns: Option<u64>,
}

impl Coverage {
    /// Share of the process's time in the recording during which its allocators were hooked and its calls were seen.
    /// (Time in which neither was the case is subtracted twice, so the share is underestimated rather than
    /// overestimated.) `detached_ns`: when the probes were detached for good (CLOCK_MONOTONIC).
    fn share(&self, now_ns: u64, detached_ns: Option<u64>) -> f64 {
        // As long as links are being made for a child, nothing is known of what they count.
        let awaits_links = self.uncovered_ns == 0 && self.late_fork().is_some_and(|late| late.missed_ns.is_none());
        if awaits_links || self.awaits_hook && !self.hooked {
            return 0.0;
        }
        let until_ns = self.until_ns.unwrap_or(now_ns);
        let length_ns = until_ns.saturating_sub(self.since_ns);
        let detached_ns = self.given_up_ns.or(self.let_go_ns).or(detached_ns);
        let after_ns = detached_ns.map_or(0, |detached_ns| until_ns.saturating_sub(detached_ns));
        let missed_ns = self.uncovered_ns.saturating_add(self.unseen.up_to(until_ns)).saturating_add(after_ns);
        if length_ns == 0 { 1.0 } else { 1.0 - (missed_ns.min(length_ns) as f64 / length_ns as f64) }
    }

    /// Its CPU time, if it was forked before links served it, and has not executed another program since.
    fn late_fork(&self) -> Option<Late> {
        self.late.filter(|late| late.since_ns == self.since_ns)
    }

    fn seen(&self, now_ns: u64, detached_ns: Option<u64>) -> ObservedShare {
        ObservedShare { share: self.share(now_ns, detached_ns), was_hidden: self.unseen.was() }
    }
}

/// The targets.
#[derive(Debug, Default)]
pub struct TargetSet {
    /// Processes in the recording, by process id: the process generation since the last exec.
    pub coverages: HashMap<u32, Coverage>,
    /// The process generation before the last exec, for processes that executed another program during the recording.
    replaced: HashMap<u32, Coverage>,
    /// Named targets and their children that are still alive. When this is empty, the recording is over.
    pub named_alive: HashSet<u32>,
    /// Whether probes ever saw nothing of one of them.
    pub some_hidden: bool,
    /// CLOCK_MONOTONIC when the probes were detached for good.
    pub detached_ns: Option<u64>,
    /// Whether the links of any process were detached.
    pub some_given_up: bool,
    /// Whether a process that was let go has been hooked again.
    pub some_again: bool,
    /// Whether no link serves every process, so that each program has to be hooked.
    hooks_each: bool,
    /// What glibc had in use in processes that already ran.
    pub(super) found_at_attach: InUseByProcess,
    /// Processes that began during the recording and whose memory was not read yet, in the order in which they began,
    /// each with [`Coverage::since_ns`].
    unread: VecDeque<(u32, u64)>,
    /// Ended processes that were forked before links served them.
    late_ended: LateForks,
}

impl TargetSet {
    /// Creates an empty set. `hooks_each`: no link serves every process, so that each program has to be hooked.
    pub fn new(hooks_each: bool) -> Self {
        Self { hooks_each, ..Self::default() }
    }

    /// Adds a process to the recording.
    pub fn begin(&mut self, pid: u32, since_ns: u64) {
        self.coverages.insert(pid, Coverage { since_ns, ..Coverage::default() });
        self.will_read(pid, since_ns);
    }

    /// Has the memory of a process that has just begun read soon.
    fn will_read(&mut self, pid: u32, since_ns: u64) {
        if self.unread.len() < MOST_UNREAD {
            self.unread.push_back((pid, since_ns));
        }
    }

    /// Reads the resident memory of processes that began at least a second ago, so that later readings show how much it
    /// grew. `read` returns the size, in bytes.
    pub fn read_first(&mut self, now_ns: u64, read: impl Fn(u32) -> Option<u64>) {
        let mut left = MOST_READ;
        let is_due = |(_, since_ns): &mut (u32, u64)| now_ns.saturating_sub(*since_ns) >= FIRST_READ_NS;
        while left > 0
            && let Some((pid, since_ns)) = self.unread.pop_front_if(is_due)
        {
            // It may have ended, or begun another program.
            let coverage = self.coverages.get_mut(&pid).filter(|it| it.since_ns == since_ns && it.until_ns.is_none());
            if let Some(coverage) = coverage.filter(|it| it.first_resident.is_none()) {
                coverage.first_resident = read(pid).map(|bytes| ResidentAt { at_ns: now_ns, bytes });
                left -= 1;
            }
        }
    }

    /// Adds a process that already runs, with the kernel's sums of its memory if they are known.
    pub fn begin_running(&mut self, pid: u32, since_ns: u64, memory: Option<&Resident>) {
        let private = |sums: &Resident| sums.undivided_bytes.saturating_add(sums.swapped_bytes);
        let coverage = Coverage {
            since_ns,
            at_attach_bytes: memory.map(private),
            first_resident: memory.map(|sums| ResidentAt { at_ns: since_ns, bytes: sums.total_bytes() }),
            ..Coverage::default()
        };
        self.coverages.insert(pid, coverage);
    }

    /// Adds a process to the recording unless it is known.
    pub fn note(&mut self, pid: u32, since_ns: u64) {
        self.coverages.entry(pid).or_insert(Coverage { since_ns, ..Coverage::default() });
    }

    /// Notes that a process generation began at `since_ns`. If it is a new one, an exec began it, and it gets coverage
    /// of its own from here on. A gap that reaches into it counts for it, because mappings of an exec may be reported
    /// before the exec.
    pub fn generation_began(&mut self, pid: u32, since_ns: u64) {
        if let Some(coverage) = self.coverages.get_mut(&pid)
            && coverage.since_ns < since_ns
        {
            let uncovered_ns = coverage.uncovered_ns.min(coverage.gap_until_ns.saturating_sub(since_ns));
            let gap_until_ns = coverage.gap_until_ns;
            let hooked = uncovered_ns > 0;
            // A new program starts with none of the previous program's memory.
            let next = Coverage {
                since_ns,
                uncovered_ns,
                gap_until_ns,
                hooked,
                awaits_hook: self.hooks_each && coverage.hooked,
                at_attach_bytes: Some(0),
                late: coverage.late,
                ..Coverage::default()
            };
            let begun = std::mem::replace(coverage, next);
            let uncovered_ns = begun.uncovered_ns - uncovered_ns;
            self.replaced.insert(pid, Coverage { until_ns: Some(since_ns), uncovered_ns, ..begun });
            self.will_read(pid, since_ns);
        }
    }

    /// How much was seen of the process generation that an exec at `exec_ns` ended.
    pub fn seen_before(&self, pid: u32, exec_ns: u64) -> ObservedShare {
        // The exec may or may not have been noted yet.
        self.replaced
            .get(&pid)
            .map_or_else(|| self.seen(pid, exec_ns), |coverage| coverage.seen(exec_ns, self.detached_ns))
    }

    /// Notes that an allocator that a process has had since `had_ns` is hooked now.
    pub fn hooked(&mut self, pid: u32, had_ns: u64, now_ns: u64) {
        let coverage = self.coverages.entry(pid).or_insert(Coverage { since_ns: had_ns, ..Coverage::default() });
        coverage.hooked = true;
        let let_go_ns = coverage.let_go_ns.take();
        coverage.again_ns = let_go_ns.map(|_| now_ns).or(coverage.again_ns);
        self.some_again |= let_go_ns.is_some();
        // Up to then it was counted.
        let had_ns = had_ns.max(let_go_ns.unwrap_or(0));
        let gap_ns = now_ns.saturating_sub(had_ns.max(coverage.since_ns));
        if gap_ns > 0 {
            coverage.uncovered_ns += gap_ns;
            coverage.gap_until_ns = coverage.gap_until_ns.max(now_ns);
        }
    }

    /// Notes that a process was forked before links served it. `missed_ns`: CPU time that it had used by then; `None`
    /// if it had ended, or no link serves it yet. Of several reports, the largest holds; those after its end are
    /// ignored.
    pub fn forked_late(&mut self, pid: u32, missed_ns: Option<u64>) {
        if let Some(coverage) = self.coverages.get_mut(&pid) {
            let before = coverage.late_fork();
            if before.is_none_or(|late| late.all_ns.is_none()) {
                let missed_ns = missed_ns.max(before.and_then(|late| late.missed_ns));
                coverage.late = Some(Late { since_ns: coverage.since_ns, missed_ns, all_ns: None });
            }
        }
    }

    /// Notes the CPU time, ns, that a process has used at its end. A second report is ignored.
    pub fn used(&mut self, pid: u32, all_ns: u64) {
        let late = self.coverages.get_mut(&pid).and_then(|coverage| coverage.late.as_mut());
        if let Some(late) = late.filter(|late| late.all_ns.is_none()) {
            late.all_ns = Some(all_ns);
            self.late_ended.add(late, all_ns);
        }
    }

    /// Share of its CPU time in which a process was counted that was forked before links served it; `None` for others,
    /// and after an exec. `cpu_ns`: the CPU time that it has used, if it runs.
    pub fn share_if_late(&self, pid: u32, cpu_ns: impl FnOnce() -> Option<u64>) -> Option<f64> {
        let late = self.coverages.get(&pid)?.late_fork()?;
        let all_ns = late.all_ns.or_else(cpu_ns)?;
        Some(late.counted_ns(all_ns) as f64 / all_ns.max(1) as f64)
    }

    /// The processes that were forked before links served them. `cpu_ns`: the CPU time that a running one has used.
    pub fn late_forks(&self, cpu_ns: impl Fn(u32) -> Option<u64>) -> LateForks {
        let mut forks = self.late_ended;
        for (pid, coverage) in &self.coverages {
            if let Some(late) = coverage.late.filter(|late| late.all_ns.is_none()) {
                forks.add(&late, cpu_ns(*pid).unwrap_or(0));
            }
        }
        forks
    }

    /// Whether a process was hooked at a given time (CLOCK_MONOTONIC), in the program that it ran then.
    pub fn was_hooked_at(&self, pid: u32, time_ns: u64) -> bool {
        let is_of_then = |coverage: &&Coverage| coverage.since_ns <= time_ns;
        let mut known = [self.coverages.get(&pid), self.replaced.get(&pid)].into_iter().flatten();
        known.find(is_of_then).is_some_and(|coverage| coverage.hooked && coverage.gap_until_ns <= time_ns)
    }

    /// Notes that a process ended. A second report is ignored.
    pub fn end(&mut self, pid: u32, now_ns: u64) {
        self.named_alive.remove(&pid);
        if let Some(coverage) = self.coverages.get_mut(&pid) {
            coverage.until_ns.get_or_insert(now_ns);
        }
    }

    /// Whether the recording has a process with this id that has not ended: ids are reused.
    pub fn is_running(&self, pid: u32) -> bool {
        self.coverages.get(&pid).is_some_and(|coverage| coverage.until_ns.is_none())
    }

    /// Running processes that have a hooked allocator.
    pub fn hooked_alive(&self) -> impl Iterator<Item = u32> + '_ {
        let is_hooked = |it: &Coverage| it.hooked && it.until_ns.is_none();
        self.coverages.iter().filter(move |(_, coverage)| is_hooked(coverage)).map(|(pid, _)| *pid)
    }

    /// How much was seen of a process; all if the process is unknown.
    pub fn seen(&self, pid: u32, now_ns: u64) -> ObservedShare {
        self.coverages.get(&pid).map_or(ObservedShare::WHOLE, |coverage| coverage.seen(now_ns, self.detached_ns))
    }

    /// Notes that probes have seen nothing of a process since a given time.
    pub fn hidden_since(&mut self, pid: u32, since_ns: u64) {
        if let Some(coverage) = self.coverages.get_mut(&pid).filter(|coverage| coverage.until_ns.is_none()) {
            let from_ns = since_ns.max(coverage.since_ns).max(coverage.unseen.until_ns.unwrap_or(0));
            coverage.unseen.since_ns.get_or_insert(from_ns);
            self.some_hidden = true;
        }
    }

    /// Notes that probes see a process again. Returns whether they had not seen it.
    pub fn seen_again(&mut self, pid: u32, now_ns: u64) -> bool {
        let Some(coverage) = self.coverages.get_mut(&pid).filter(|coverage| coverage.until_ns.is_none()) else {
            return false;
        };
        let unseen = &mut coverage.unseen;
        let Some(since_ns) = unseen.since_ns.take() else { return false };
        unseen.ns += now_ns.saturating_sub(since_ns);
        unseen.until_ns = Some(now_ns);
        true
    }

    /// Notes that the program that a process runs is no longer counted.
    pub fn give_up(&mut self, pid: u32, now_ns: u64) {
        if let Some(coverage) = self.coverages.get_mut(&pid) {
            coverage.given_up_ns = Some(now_ns);
            self.some_given_up = true;
        }
    }

    /// Notes that the program that a process runs is not counted until it is hooked again.
    pub fn let_go(&mut self, pid: u32, now_ns: u64) {
        if let Some(coverage) = self.coverages.get_mut(&pid) {
            coverage.let_go_ns = Some(now_ns);
            self.some_given_up = true;
        }
    }

    /// Whether the program that a process runs is no longer counted.
    pub fn is_given_up(&self, pid: u32) -> bool {
        self.coverages.get(&pid).is_some_and(|coverage| coverage.given_up_ns.or(coverage.let_go_ns).is_some())
    }

    /// Whether probes see nothing of a process now.
    pub fn is_hidden(&self, pid: u32) -> bool {
        self.coverages.get(&pid).is_some_and(|coverage| coverage.unseen.since_ns.is_some())
    }

    /// Whether probes did not see the program that a process runs for a while.
    pub fn was_hidden(&self, pid: u32) -> bool {
        self.coverages.get(&pid).is_some_and(|coverage| coverage.until_ns.is_none() && coverage.unseen.was())
    }

    /// Since when a process is seen or hooked again (CLOCK_MONOTONIC); `None` if it always was.
    pub fn seen_again_ns(&self, pid: u32) -> Option<u64> {
        let coverage = self.coverages.get(&pid)?;
        coverage.unseen.until_ns.max(coverage.again_ns)
    }

    /// Processes whose last exec left a gap in which nothing was counted, and its length, ns.
    pub fn gaps_after_exec(&self) -> Vec<(u32, u64)> {
        let gap = |pid: &u32| Some((*pid, self.coverages.get(pid)?.uncovered_ns)).filter(|(_, gap_ns)| *gap_ns > 0);
        let mut gaps: Vec<(u32, u64)> = self.replaced.keys().filter_map(gap).collect();
        gaps.sort_unstable();
        gaps
    }

    /// What a process had when it joined the recording.
    pub fn at_attach(&self, pid: u32) -> AtAttach {
        let coverage = self.coverages.get(&pid);
        let anonymous_bytes = coverage.and_then(|coverage| coverage.at_attach_bytes);
        let resident = coverage.and_then(|coverage| coverage.first_resident);
        let inuse = match anonymous_bytes {
            None => None,
            // A program that started during the recording.
            Some(0) => Some(InUse::default()),
            Some(_) => self.found_at_attach.lock().unwrap_or_else(PoisonError::into_inner).get(&pid).copied(),
        };
        AtAttach { since_ns: coverage.map_or(0, |it| it.since_ns), anonymous_bytes, resident, inuse }
    }

    /// Forgets processes that ended before `before_ns`, and returns their ids.
    pub fn forget(&mut self, before_ns: u64) -> Vec<u32> {
        let ended = self.coverages.extract_if(|_, coverage| coverage.until_ns.is_some_and(|until| until < before_ns));
        let ended = ended.map(|(pid, _)| pid).collect();
        self.replaced.retain(|pid, _| self.coverages.contains_key(pid));
        // Gives back the memory that many short-lived processes took.
        if self.coverages.len() < self.coverages.capacity() / 4 {
            self.coverages.shrink_to(2 * self.coverages.len());
        }
        self.replaced.shrink_to(2 * self.replaced.len());
        ended
    }
}

#[cfg(test)]
#[path = "targets_tests.rs"]
mod tests;
