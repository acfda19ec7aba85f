//! Which processes are hooked inline next: the busiest that are not counted yet. Allocating takes CPU time, so a
//! process that uses none has nothing to show, and costs nothing as long as it is not hooked. If too many are hooked,
//! the one that has been idle longest makes way. Pure.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use heapbpf_attach::inline::attempts::Attempts;
use sampler_ebpf::abi::{LivingThread, ProcessKey, Progress};

/// Time between checks while uncounted processes are busy, ns. Otherwise the time doubles from check to check.
const SHORTEST_PAUSE_NS: u64 = 100_000_000;
/// Longest time between checks, ns.
const LONGEST_PAUSE_NS: u64 = 1_600_000_000;
/// A process that used less CPU time is not hooked, ns: starting alone takes that much.
const LEAST_CPU_NS: u64 = 1_000_000;
/// Share of the host's CPU time that hooking may take.
const SHARE: f64 = 0.01;
/// Maximum that it may take at once, at the start and after a quiet time, ns: enough to hook many processes within the
/// first second.
const MOST_SAVED_NS: f64 = 400_000_000.0;
/// Maximum number of processes that are prepared at the same time: what that takes is known afterwards.
const MOST_PREPARED: usize = 8;
/// Time for which a process counts among them, ns. After that it waits for a moment in which it can be stopped.
const RECENT_NS: u64 = 500_000_000;
/// Longest time for which a process has a place before it is hooked, ns. Attempts to stop one end sooner.
const PREPARED_WITHIN_NS: u64 = 15_000_000_000;
/// Maximum number of processes that are hooked at the same time: each has links of its own, and the kernel keeps all
/// links in one list.
const MOST_AT_ONCE: usize = 512;
/// Minimum of that number, if few descriptors are left for it.
const FEWEST_AT_ONCE: usize = 8;
/// Descriptors that a hooked process takes: for its code, its memory and a link, or four links with an event each.
const DESCRIPTORS_EACH: usize = 10;
/// A hooked process is idle if it has used less than [`LEAST_CPU_NS`] for this long, ns.
const IDLE_FOR_NS: u64 = 10_000_000_000;
/// A process takes the place of an idle one if it used this much CPU time since the last check, ns: as much as hooking
/// one and letting another go take.
const WORTH_A_PLACE_NS: u64 = 10_000_000;

/// Number of processes that may be hooked at the same time with this many descriptors for them.
pub fn places(descriptors: usize) -> usize {
    (descriptors / DESCRIPTORS_EACH).clamp(FEWEST_AT_ONCE, MOST_AT_ONCE)
}

/// How a process is counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Standing {
    /// Not yet.
    #[default]
    Uncounted,
    /// Counted since it had used this much CPU time, ns. What it used while only some of its allocators were counted is
    /// added.
    Since(u64),
    /// Not counted, for good.
    Refused,
    /// No longer counted, for good.
    GivenUp,
}

/// What is known about a process.
#[derive(Clone, Copy, Debug, Default)]
struct ProcessActivity {
    /// CPU time that it had used when it joined the recording, or when it executed its program during it, ns.
    first_ns: u64,
    /// CPU time at the last check, and at the one before.
    cpu_ns: u64,
    before_ns: u64,
    standing: Standing,
    /// CPU time while it was counted before it was let go or given up, ns.
    kept_ns: u64,
    /// CPU time when it was let go, ns.
    let_go_at_ns: Option<u64>,
    /// CPU time when it was last found active, ns, and when that was (CLOCK_MONOTONIC; 0 before its first check).
    active: (u64, u64),
    /// Whether it was a target at a check by which it had used CPU time, with this program or an earlier one.
    is_target: bool,
    /// CPU time as a target with the programs that it ran before.
    earlier: CpuTime,
    /// Since when it is being prepared for its hooks (CLOCK_MONOTONIC), if it is: then it has a place.
    prepared_since_ns: Option<u64>,
    attempts: Attempts,
    /// Not tried again before this time (CLOCK_MONOTONIC).
    not_before_ns: u64,
}

/// CPU time of targets since they joined the recording, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTime {
    /// In all.
    pub all_ns: u64,
    /// While their calls were counted.
    pub counted_ns: u64,
}

impl CpuTime {
    /// All of it, in seconds.
    pub fn seconds(self) -> f64 {
        self.all_ns as f64 * 1e-9
    }

    /// The counted share; 1 if there is no CPU time.
    pub fn share(self) -> f64 {
        if self.all_ns == 0 { 1.0 } else { self.counted_ns as f64 / self.all_ns as f64 }
    }

    fn add(&mut self, other: Self) {
        self.all_ns += other.all_ns;
        self.counted_ns += other.counted_ns;
    }
}

impl ProcessActivity {
    /// CPU time with its present program.
    fn cpu(&self) -> CpuTime {
        let since_ns = match self.standing {
            Standing::Since(ns) => self.cpu_ns.saturating_sub(ns.max(self.first_ns)),
            Standing::Uncounted | Standing::Refused | Standing::GivenUp => 0,
        };
        CpuTime { all_ns: self.cpu_ns.saturating_sub(self.first_ns), counted_ns: self.kept_ns + since_ns }
    }

    /// Whether it is not counted, and has used enough CPU time to be hooked: `least_ns`, or what an active process uses
    /// if it was let go.
    fn is_wanted(&self, first_ns: u64, least_ns: u64) -> bool {
        let from_ns = self.let_go_at_ns.map_or(first_ns + least_ns, |at_ns| at_ns + LEAST_CPU_NS);
        self.standing == Standing::Uncounted && self.prepared_since_ns.is_none() && self.cpu_ns >= from_ns
    }

    /// Notes that it is counted from now on. `cpu_ns`: CPU time that it has used by now, if that is known.
    fn begin(&mut self, cpu_ns: Option<u64>) {
        // It may end before the next check.
        self.cpu_ns = self.cpu_ns.max(cpu_ns.unwrap_or(0));
        (self.is_target, self.standing, self.prepared_since_ns) = (true, Standing::Since(self.cpu_ns), None);
    }

    /// Notes that it is not counted any more.
    fn stop(&mut self, standing: Standing) {
        self.kept_ns = self.cpu().counted_ns;
        (self.standing, self.prepared_since_ns) = (standing, None);
    }

    /// CPU time as a target, with all its programs.
    fn as_target(&self) -> CpuTime {
        let mut sum = self.earlier;
        if self.is_target {
            sum.add(self.cpu());
        }
        sum
    }

    /// What is known of the process after it executed another program. Its CPU time goes on, its hooks do not.
    fn after_exec(self) -> Self {
        Self { first_ns: self.cpu_ns, cpu_ns: self.cpu_ns, earlier: self.as_target(), ..Self::default() }
    }
}

/// Identifies a process whatever program it runs: an exec changes its key.
const fn of_any_program(process: ProcessKey) -> ProcessKey {
    ProcessKey { exec_id: 0, ..process }
}

/// How active processes are, and which are counted.
#[derive(Debug)]
pub struct Activity {
    processes: HashMap<ProcessKey, ProcessActivity>,
    /// CPU time of processes that started before the recording and have ended. The BPF programs add up those that
    /// started during it and were targets at their end, each as counted or not. Of those that were no longer counted
    /// then, this has the counted part, and of those that were no longer targets, what they used as targets.
    ended: CpuTime,
    /// CPU time of processes that started during the recording and were counted at their end, from before they were
    /// counted, ns.
    late_ns: u64,
    /// When the recording began (CLOCK_BOOTTIME).
    began_ns: u64,
    /// CPU time that hooking may take now, ns.
    saved_ns: f64,
    processors: f64,
    /// Number of processes that may be hooked at the same time.
    places: usize,
    /// Processes that were taken in since the last check, which shows how they are counted.
    taken_in: HashSet<u32>,
    /// Processes that have ended since the last check.
    over: HashSet<u32>,
    /// A process that used less CPU time in the recording is not hooked, ns.
    least_ns: u64,
    looked_ns: u64,
    pause_ns: u64,
    /// When processes are checked next (CLOCK_MONOTONIC).
    next_ns: u64,
}

impl Activity {
    /// Creates the state; nothing is known yet. `processors`: of the host. `began_ns`: when the recording began
    /// (CLOCK_BOOTTIME). `are_named`: not all processes are targets, and targets count as soon as they run.
    pub fn new(processors: usize, began_ns: u64, are_named: bool) -> Self {
        Self {
            processes: HashMap::new(),
            ended: CpuTime::default(),
            late_ns: 0,
            began_ns,
            saved_ns: MOST_SAVED_NS,
            processors: processors as f64,
            places: MOST_AT_ONCE,
            taken_in: HashSet::new(),
            over: HashSet::new(),
            least_ns: if are_named { 1 } else { LEAST_CPU_NS },
            looked_ns: 0,
            pause_ns: SHORTEST_PAUSE_NS,
            next_ns: 0,
        }
    }

    /// Lets so many processes be hooked at the same time.
    pub fn with_places(self, places: usize) -> Self {
        Self { places, ..self }
    }

    /// When processes must be checked again (CLOCK_MONOTONIC).
    pub const fn next_ns(&self) -> u64 {
        self.next_ns
    }

    /// Makes the next check happen no later than this time (CLOCK_MONOTONIC).
    pub fn is_due_at(&mut self, at_ns: u64) {
        self.next_ns = self.next_ns.min(at_ns);
    }

    /// Updates the CPU time of all threads of the host. `is_counted`: whether calls of a process are counted now.
    /// `is_target`: whether its CPU time belongs to a target.
    pub fn look(
        &mut self,
        threads: &[LivingThread],
        now_ns: u64,
        is_counted: impl Fn(ProcessKey) -> bool,
        mut is_target: impl FnMut(ProcessKey) -> bool,
    ) {
        let is_first = self.looked_ns == 0;
        let passed_ns = now_ns.saturating_sub(self.looked_ns);
        self.looked_ns = now_ns;
        self.taken_in.clear();
        self.over.clear();
        if !is_first {
            self.saved_ns = (self.saved_ns + passed_ns as f64 * self.processors * SHARE).min(MOST_SAVED_NS);
        }
        let mut cpu: HashMap<ProcessKey, u64> = HashMap::with_capacity(self.processes.len());
        // Kernel threads have no memory, and neither does a thread that is about to end.
        for thread in threads {
            if thread.memory_users > 0 || self.processes.contains_key(&thread.process) {
                *cpu.entry(thread.process).or_default() += thread.cpu_ns;
            }
        }
        let (mut is_any_new_busy, mut retry_ns) = (false, u64::MAX);
        let mut before = std::mem::take(&mut self.processes);
        let gone = before.extract_if(|process, _| !cpu.contains_key(process));
        let mut gone: HashMap<_, _> = gone.map(|(process, known)| (of_any_program(process), known)).collect();
        for (process, cpu_ns) in cpu {
            let looked = before.remove(&process);
            let replaced = || gone.remove(&of_any_program(process)).map(ProcessActivity::after_exec);
            let mut known = looked.or_else(replaced).unwrap_or_default();
            let first_ns = if is_first { cpu_ns } else { known.first_ns };
            // CPU time of ended threads may be missing for a moment.
            let cpu_ns = cpu_ns.max(known.cpu_ns);
            (known.before_ns, known.cpu_ns) = (known.cpu_ns, cpu_ns);
            if known.active.1 == 0 || cpu_ns >= known.active.0 + LEAST_CPU_NS {
                known.active = (cpu_ns, now_ns);
            }
            if known.standing == Standing::Uncounted && is_counted(process) {
                // A child has its parent's hooks from its start on.
                let is_new = looked.is_none() && process.start_ns >= self.began_ns;
                known.standing = Standing::Since(if is_new { 0 } else { cpu_ns });
            }
            if known.is_wanted(first_ns, self.least_ns) {
                is_any_new_busy |= known.not_before_ns <= now_ns;
                retry_ns = retry_ns.min(known.not_before_ns.max(now_ns + SHORTEST_PAUSE_NS));
            }
            let has_run = cpu_ns > first_ns || known.earlier != CpuTime::default();
            let is_target = known.is_target || has_run && is_target(process);
            self.processes.insert(process, ProcessActivity { first_ns, is_target, ..known });
        }
        for (process, known) in gone {
            let cpu = known.as_target();
            let is_counted = matches!(known.standing, Standing::Since(_));
            if process.start_ns < self.began_ns || !known.is_target && !is_counted {
                // The BPF programs added none of it.
                self.ended.add(cpu);
            } else if is_counted {
                // They added all of it as counted.
                self.late_ns += cpu.all_ns - cpu.counted_ns;
            } else {
                // They added all of it as not counted.
                self.ended.counted_ns += cpu.counted_ns;
            }
        }
        self.pause_ns = match is_any_new_busy || is_first {
            true => SHORTEST_PAUSE_NS,
            false => (2 * self.pause_ns).min(LONGEST_PAUSE_NS),
        };
        self.next_ns = (now_ns + self.pause_ns).min(retry_ns).max(self.may_hook_ns());
    }

    /// When hooking may take CPU time again (CLOCK_MONOTONIC), or the longest pause ends. Earlier checks find nothing to
    /// do.
    fn may_hook_ns(&self) -> u64 {
        let until_ns = ((-self.saved_ns).max(0.0) / (self.processors * SHARE)) as u64;
        self.looked_ns + until_ns.min(LONGEST_PAUSE_NS)
    }

    /// Skips a process that is no target now, or for which there is no place. It is not considered again for a while.
    pub fn pass_over(&mut self, process: ProcessKey, now_ns: u64) {
        if let Some(known) = self.processes.get_mut(&process) {
            (known.not_before_ns, known.prepared_since_ns) = (now_ns + LONGEST_PAUSE_NS, None);
        }
    }

    /// No process waits to be hooked: checks come as rarely as possible.
    pub const fn rest(&mut self, now_ns: u64) {
        self.next_ns = now_ns + LONGEST_PAUSE_NS;
    }

    /// The processes to be hooked now, the busiest first.
    pub fn due(&self, now_ns: u64) -> Vec<ProcessKey> {
        if self.is_spent() {
            return Vec::new();
        }
        let is_due =
            |known: &ProcessActivity| known.is_wanted(known.first_ns, self.least_ns) && known.not_before_ns <= now_ns;
        let due = self.processes.iter().filter(|(_, known)| is_due(known));
        let mut due: Vec<_> = due.map(|(process, it)| (Reverse(it.cpu_ns - it.before_ns), *process)).collect();
        due.sort_unstable();
        due.into_iter().map(|(_, process)| process).collect()
    }

    /// Notes that a process is being prepared for its hooks: it has a place, and is not due. Returns false if that has
    /// taken too long.
    pub fn prepares(&mut self, process: ProcessKey, now_ns: u64) -> bool {
        let Some(known) = self.processes.get_mut(&process) else { return false };
        let since_ns = *known.prepared_since_ns.get_or_insert(now_ns);
        now_ns.saturating_sub(since_ns) < PREPARED_WITHIN_NS
    }

    /// For how long a process has been prepared for its hooks, ns.
    pub fn prepared_for_ns(&self, process: ProcessKey, now_ns: u64) -> u64 {
        let since_ns = self.processes.get(&process).and_then(|known| known.prepared_since_ns);
        since_ns.map_or(0, |since_ns| now_ns.saturating_sub(since_ns))
    }

    /// Whether a process is being prepared for its hooks.
    pub fn is_being_prepared(&self, process: ProcessKey) -> bool {
        self.processes.get(&process).is_some_and(|known| known.prepared_since_ns.is_some())
    }

    /// Whether a process that was due is still to be hooked.
    pub fn awaits_hooks(&self, process: ProcessKey) -> bool {
        let standing = self.processes.get(&process).map(|known| known.standing);
        standing == Some(Standing::Uncounted) || self.is_being_prepared(process)
    }

    /// Whether a process has a place already, or one is left for it. `promised`: processes that have one because they
    /// are about to be taken in.
    pub fn has_place(&self, pid: u32, promised: &HashSet<u32>) -> bool {
        let has_one =
            |it: &ProcessActivity| matches!(it.standing, Standing::Since(_)) || it.prepared_since_ns.is_some();
        let known = self.processes.iter().filter(|(_, it)| has_one(it)).map(|(process, _)| process.tgid);
        let living = known.filter(|tgid| !self.over.contains(tgid));
        let taken: HashSet<u32> = living.chain(self.taken_in.iter().chain(promised).copied()).collect();
        taken.contains(&pid) || taken.len() < self.places
    }

    /// Notes that a process was taken in: it has a place, whether or not a check has seen it.
    pub fn took_in(&mut self, pid: u32) {
        self.taken_in.insert(pid);
    }

    /// The process to let go so that a busy one can be hooked: of those that `may_go`, the one that has been idle
    /// longest. `None` if no process is idle, or the other one is not busy enough.
    pub fn idlest_for(&self, busy: ProcessKey, now_ns: u64, may_go: impl Fn(ProcessKey) -> bool) -> Option<ProcessKey> {
        let used_ns = self.processes.get(&busy).map_or(0, |known| known.cpu_ns - known.before_ns);
        if used_ns < WORTH_A_PLACE_NS {
            return None;
        }
        let is_idle = |known: &ProcessActivity| {
            let is_counted = matches!(known.standing, Standing::Since(_)) && known.prepared_since_ns.is_none();
            is_counted && now_ns.saturating_sub(known.active.1) >= IDLE_FOR_NS
        };
        let idle = self.processes.iter().filter(|(process, known)| is_idle(known) && may_go(**process));
        idle.min_by_key(|(process, known)| (known.active.1, **process)).map(|(process, _)| *process)
    }

    /// Notes that a process was counted up to the last check, and is not until it is active again.
    pub fn let_go(&mut self, process: ProcessKey) {
        if let Some(known) = self.processes.get_mut(&process) {
            known.stop(Standing::Uncounted);
            known.let_go_at_ns = Some(known.cpu_ns);
        }
    }

    /// Notes that an idle process could not be let go: it is not chosen again for a while.
    pub fn stays(&mut self, process: ProcessKey, now_ns: u64) {
        if let Some(known) = self.processes.get_mut(&process) {
            known.active.1 = now_ns;
        }
    }

    /// Whether hooking has used up its CPU time for now, or enough processes are being prepared.
    pub fn is_spent(&self) -> bool {
        let is_recent = |since_ns: u64| self.looked_ns.saturating_sub(since_ns) < RECENT_NS;
        let prepared = self.processes.values().filter(|known| known.prepared_since_ns.is_some_and(is_recent));
        self.saved_ns <= 0.0 || prepared.count() >= MOST_PREPARED
    }

    /// Subtracts CPU time that hooking took, ns.
    pub fn spend(&mut self, ns: u64) {
        self.saved_ns -= ns as f64;
        self.next_ns = self.next_ns.max(self.may_hook_ns());
    }

    /// Notes that a process is counted from now on. `cpu_ns`: CPU time that it has used by now, if that is known. If it
    /// has executed another program since it was due, the next check finds that one counted.
    pub fn counted(&mut self, process: ProcessKey, cpu_ns: Option<u64>) {
        let Some(known) = self.processes.get_mut(&process) else { return };
        known.is_target = true;
        // A check may have found the first of its allocators hooked.
        if known.prepared_since_ns.is_some() || !matches!(known.standing, Standing::Since(_)) {
            known.begin(cpu_ns);
        }
    }

    /// Notes that a process is counted from now on. Its program used `missed_ns` of CPU time before; `cpu_ns` is as in
    /// [`Self::counted`].
    pub fn counted_late(&mut self, process: ProcessKey, missed_ns: u64, cpu_ns: Option<u64>) {
        if let Some(known) = self.processes.get_mut(&process) {
            // What it used up to now is known, and is added to `late_ns` when it ends.
            known.begin(cpu_ns);
        } else if process.start_ns >= self.began_ns {
            // The next check takes it for one that was counted from its start on.
            self.late_ns += missed_ns;
        }
    }

    /// Notes that a counted process used this much CPU time, ns, before an allocator was counted that it had loaded.
    pub fn lacked(&mut self, process: ProcessKey, ns: u64) {
        // A program that no check has seen yet is counted from its start if its process started in the recording.
        let is_new = !self.processes.contains_key(&process) && process.start_ns >= self.began_ns;
        let Some(known) = self.known(process) else { return };
        if is_new {
            known.standing = Standing::Since(0);
        }
        // What it used before it was counted counts for nothing anyway.
        if let Standing::Since(since_ns) = known.standing {
            known.standing = Standing::Since(since_ns.max(known.first_ns).saturating_add(ns));
        }
    }

    /// Notes that nothing counted a program, which is over. Of processes that started during the recording, the BPF
    /// programs add up what such a program used.
    pub fn missed(&mut self, process: ProcessKey) {
        let is_known = self.processes.keys().any(|other| of_any_program(*other) == of_any_program(process));
        if process.start_ns < self.began_ns
            && is_known
            && let Some(known) = self.known(process)
        {
            known.is_target = true;
        }
    }

    /// Notes that a process has ended, after this much CPU time, ns. Its place is free at once: many may start and end
    /// between two checks.
    pub fn ended(&mut self, process: ProcessKey, cpu_ns: u64) {
        self.taken_in.remove(&process.tgid);
        self.over.insert(process.tgid);
        if let Some(known) = self.processes.get_mut(&process) {
            known.cpu_ns = known.cpu_ns.max(cpu_ns);
        }
    }

    /// What is known of a process with its present program, even if no check has seen that yet. `None` if it has
    /// executed another one since.
    fn known(&mut self, process: ProcessKey) -> Option<&mut ProcessActivity> {
        let is_same = |other: &ProcessKey| of_any_program(*other) == of_any_program(process);
        let last = self.processes.keys().copied().find(is_same).unwrap_or(process);
        if last.exec_id > process.exec_id {
            return None;
        }
        let known = self.processes.remove(&last).unwrap_or_default();
        let known = if last == process { known } else { known.after_exec() };
        Some(self.processes.entry(process).or_insert(known))
    }

    /// Notes that a process could not be hooked now. Returns whether it is tried again.
    pub fn postponed(&mut self, process: ProcessKey, now_ns: u64) -> bool {
        let Some(known) = self.processes.get_mut(&process) else { return false };
        match known.attempts.failed() {
            Some(pause) => known.not_before_ns = now_ns + pause.as_nanos() as u64,
            None => known.standing = Standing::Refused,
        }
        known.prepared_since_ns = None;
        known.standing != Standing::Refused
    }

    /// Notes that a process will never be counted.
    pub fn refused(&mut self, process: ProcessKey) {
        if let Some(known) = self.processes.get_mut(&process) {
            (known.standing, known.prepared_since_ns) = (Standing::Refused, None);
        }
    }

    /// Notes that a process was counted up to the last check, and no longer is. It is not hooked again, even if no check
    /// has seen its present program yet.
    pub fn given_up(&mut self, process: ProcessKey) {
        if let Some(known) = self.known(process) {
            known.stop(Standing::GivenUp);
        }
    }

    /// CPU time of a process since it joined the recording; `None` if it is not known.
    pub fn of(&self, process: ProcessKey) -> Option<CpuTime> {
        self.processes.get(&process).map(ProcessActivity::cpu)
    }

    /// CPU time of all targets. `ended`: what the BPF programs added up.
    pub fn of_all(&self, ended: &Progress, mut is_target: impl FnMut(ProcessKey) -> bool) -> CpuTime {
        let mut sum = self.ended;
        for (process, known) in &self.processes {
            sum.add(known.earlier);
            if is_target(*process) {
                sum.add(known.cpu());
            }
        }
        sum.add(CpuTime {
            all_ns: ended.ended_counted_ns + ended.ended_uncounted_ns,
            counted_ns: ended.ended_counted_ns.saturating_sub(self.late_ns),
        });
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn process(tgid: u32) -> ProcessKey {
        ProcessKey { tgid, ..ProcessKey::default() }
    }

    /// Checks processes with this much CPU time, ms. Returns those that are due.
    fn look(activity: &mut Activity, cpu_ms: &[(u32, u64)], now_ms: u64) -> Vec<u32> {
        let thread =
            |(tgid, ms): &(u32, u64)| LivingThread { process: process(*tgid), memory_users: 1, cpu_ns: ms * MS };
        activity.look(
            &cpu_ms.iter().map(thread).collect::<Vec<_>>(),
            now_ms * MS,
            |_| false,
            |process| process.tgid != 9,
        );
        activity.due(now_ms * MS).into_iter().map(|process| process.tgid).collect()
    }

    #[test]
    fn what_a_program_used_before_it_was_hooked_is_not_counted_and_is_taken_off_once() {
        let process = ProcessKey { tgid: 1, start_ns: 5, ..ProcessKey::default() };
        let thread = |ms| [LivingThread { process, memory_users: 1, cpu_ns: ms * MS }];
        // A check may or may not find it before it is hooked, and before it ends.
        for (is_found_before, is_found_after) in [(false, false), (false, true), (true, false), (true, true)] {
            let mut activity = Activity::new(2, 1, true);
            activity.look(&[], 100 * MS, |_| false, |_| true);
            if is_found_before {
                activity.look(&thread(2), 200 * MS, |_| false, |_| true);
            }
            activity.counted_late(process, 3 * MS, Some(3 * MS));
            if is_found_after {
                activity.look(&thread(8), 300 * MS, |_| true, |_| true);
            }
            activity.look(&[], 400 * MS, |_| false, |_| true);
            let ended = Progress { ended_counted_ns: 10 * MS, ended_uncounted_ns: 2 * MS, ..Progress::default() };
            let expected = CpuTime { all_ns: 12 * MS, counted_ns: 7 * MS };
            assert_eq!(activity.of_all(&ended, |_| true), expected, "{is_found_before} {is_found_after}");
        }
    }

    /// One process began before the recording, and one in it. The second is not known yet when it loads an allocator.
    #[test]
    fn what_a_process_used_before_a_loaded_allocator_was_hooked_is_not_counted() {
        let mut activity = Activity::new(2, 1, true);
        let [old, new] = [0, 5].map(|start_ns| ProcessKey { tgid: 1, start_ns, exec_id: 0 });
        let look = |activity: &mut Activity, cpu_ms: &[(ProcessKey, u64)], now_ms: u64| {
            let thread = |(process, ms): &(ProcessKey, u64)| LivingThread {
                process: *process,
                memory_users: 1,
                cpu_ns: ms * MS,
            };
            let threads: Vec<_> = cpu_ms.iter().map(thread).collect();
            activity.look(&threads, now_ms * MS, |_| true, |_| true);
        };
        look(&mut activity, &[(old, 1000)], 100);
        activity.lacked(old, 20 * MS);
        activity.lacked(new, 30 * MS);
        look(&mut activity, &[(old, 1100), (new, 40)], 200);
        assert_eq!(activity.of(old), Some(CpuTime { all_ns: 100 * MS, counted_ns: 80 * MS }));
        assert_eq!(activity.of(new), Some(CpuTime { all_ns: 40 * MS, counted_ns: 10 * MS }));
        // The BPF programs add up what began in the recording as counted.
        look(&mut activity, &[], 300);
        let ended = Progress { ended_counted_ns: 40 * MS, ..Progress::default() };
        assert_eq!(activity.of_all(&ended, |_| true), CpuTime { all_ns: 140 * MS, counted_ns: 90 * MS });
    }

    #[test]
    fn the_busiest_come_first_and_idle_ones_never() {
        let mut activity = Activity::new(2, 1, false);
        assert!(look(&mut activity, &[(1, 9000), (2, 0), (3, 5)], 100).is_empty(), "what was before says nothing");
        assert_eq!(look(&mut activity, &[(1, 9000), (2, 7), (3, 25), (4, 3)], 200), [3, 2, 4]);
        activity.counted(process(3), Some(25 * MS));
        activity.refused(process(2));
        assert!(activity.postponed(process(4), 200 * MS));
        assert_eq!(look(&mut activity, &[(1, 9001), (2, 99), (3, 99), (4, 99)], 205), [1]);
        assert_eq!(look(&mut activity, &[(1, 9001), (2, 99), (3, 99), (4, 99)], 300), [1, 4]);
    }

    #[test]
    fn threads_of_a_process_are_added_up_and_kernel_threads_left_out() {
        let mut activity = Activity::new(2, 1, false);
        let thread = |tgid, memory_users| LivingThread { process: process(tgid), memory_users, cpu_ns: 9 * MS };
        activity.look(&[], MS, |_| false, |_| true);
        activity.look(&[thread(1, 2), thread(1, 2), thread(2, 0)], 2 * MS, |_| false, |_| true);
        assert_eq!(activity.due(2 * MS), [process(1)]);
        let cpu = activity.of(process(1)).unwrap();
        assert_eq!((cpu.all_ns, cpu.counted_ns, activity.of(process(2))), (18 * MS, 0, None));
    }

    #[test]
    fn shares_are_of_the_time_since_the_recording_began() {
        let mut activity = Activity::new(2, 1, false);
        look(&mut activity, &[(1, 1000), (2, 500)], 100);
        look(&mut activity, &[(1, 1010), (2, 500), (3, 30)], 200);
        activity.counted(process(1), Some(1020 * MS));
        activity.counted(process(3), None);
        look(&mut activity, &[(1, 1060), (2, 540), (3, 70)], 300);
        let share = |tgid| activity.of(process(tgid)).unwrap().share();
        assert!((share(1) - 40.0 / 60.0).abs() < 1e-9 && share(2) == 0.0 && (share(3) - 40.0 / 70.0).abs() < 1e-9);
        let nobody = Progress::default();
        let all = activity.of_all(&nobody, |_| true);
        assert_eq!((all.all_ns, all.counted_ns), (170 * MS, 80 * MS));
        assert_eq!(activity.of_all(&nobody, |process| process.tgid == 2), CpuTime { all_ns: 40 * MS, counted_ns: 0 });
        // They began before the recording, and end.
        look(&mut activity, &[], 400);
        assert_eq!(activity.of_all(&nobody, |_| true), all);
    }

    #[test]
    fn whoever_is_no_target_and_ends_is_in_no_share() {
        let mut activity = Activity::new(2, 1, true);
        look(&mut activity, &[(1, 10), (9, 10)], 100);
        look(&mut activity, &[(1, 20), (9, 500)], 200);
        look(&mut activity, &[], 300);
        assert_eq!(activity.of_all(&Progress::default(), |_| true), CpuTime { all_ns: 10 * MS, counted_ns: 0 });
    }

    #[test]
    fn what_was_counted_stays_so_when_it_is_over() {
        let mut activity = Activity::new(2, 1, false);
        look(&mut activity, &[(1, 1000), (2, 0)], 100);
        activity.counted(process(1), Some(1000 * MS));
        look(&mut activity, &[(1, 1030), (2, 10)], 200);
        [1, 2, 3].iter().for_each(|tgid| activity.given_up(process(*tgid)));
        assert!(look(&mut activity, &[(1, 1090), (2, 90), (3, 90)], 300).is_empty(), "nobody is hooked any more");
        let share = |tgid| activity.of(process(tgid)).unwrap().share();
        assert!((share(1) - 30.0 / 90.0).abs() < 1e-9 && share(2) == 0.0 && share(3) == 0.0);
    }

    #[test]
    fn those_that_began_and_ended_in_the_recording_are_added_up_by_the_programs() {
        let mut activity = Activity::new(2, 1, false);
        let process = |tgid| ProcessKey { tgid, start_ns: 5, ..ProcessKey::default() };
        let mut look = |cpu_ms: &[(u32, u64)], now_ms: u64, counted: &[u32]| {
            let thread =
                |(tgid, ms): &(u32, u64)| LivingThread { process: process(*tgid), memory_users: 1, cpu_ns: ms * MS };
            let threads: Vec<_> = cpu_ms.iter().map(thread).collect();
            activity.look(&threads, now_ms * MS, |process| counted.contains(&process.tgid), |_| true);
        };
        look(&[], 100, &[]);
        // The first has its parent's hooks, the second is hooked later, the third never.
        look(&[(1, 10), (2, 20), (3, 30)], 200, &[1]);
        look(&[(1, 20), (2, 25), (3, 40)], 300, &[1, 2]);
        look(&[(1, 30), (2, 35), (3, 50)], 400, &[1, 2]);
        assert_eq!([1, 2, 3].map(|tgid| activity.of(process(tgid)).unwrap().counted_ns), [30 * MS, 10 * MS, 0]);
        let all = activity.of_all(&Progress::default(), |_| true);
        activity.look(&[], 500 * MS, |_| false, |_| true);
        let ended = Progress { ended_counted_ns: 65 * MS, ended_uncounted_ns: 50 * MS, ..Progress::default() };
        assert_eq!((all.all_ns, activity.of_all(&ended, |_| true)), (115 * MS, all));
    }

    /// Checks processes, some of which began in the recording, with this much CPU time, ms.
    fn look_at(activity: &mut Activity, cpu_ms: &[(ProcessKey, u64)], now_ms: u64) {
        let thread =
            |(process, ms): &(ProcessKey, u64)| LivingThread { process: *process, memory_users: 1, cpu_ns: ms * MS };
        activity.look(&cpu_ms.iter().map(thread).collect::<Vec<_>>(), now_ms * MS, |_| false, |_| true);
    }

    #[test]
    fn whoever_ends_before_the_check_after_its_hooks_was_not_counted_before_them() {
        let mut activity = Activity::new(2, 1, false);
        let short = ProcessKey { tgid: 1, start_ns: 5, ..ProcessKey::default() };
        look_at(&mut activity, &[], 100);
        look_at(&mut activity, &[(short, 20)], 200);
        activity.counted(short, Some(25 * MS));
        look_at(&mut activity, &[], 300);
        let ended = Progress { ended_counted_ns: 40 * MS, ..Progress::default() };
        assert_eq!(activity.of_all(&ended, |_| true), CpuTime { all_ns: 40 * MS, counted_ns: 15 * MS });
    }

    #[test]
    fn an_exec_neither_ends_nor_begins_a_process() {
        let mut activity = Activity::new(2, 1, false);
        // One began before the recording, and one in it.
        let [old, new] = [0, 5].map(|start_ns| [0, 1].map(|exec_id| ProcessKey { start_ns, tgid: 1, exec_id }));
        look_at(&mut activity, &[(old[0], 10_000)], 100);
        look_at(&mut activity, &[(old[1], 10_100), (new[0], 50)], 200);
        assert_eq!(activity.of(old[1]), Some(CpuTime { all_ns: 100 * MS, counted_ns: 0 }));
        look_at(&mut activity, &[(old[1], 10_100), (new[1], 60)], 300);
        activity.counted(new[1], Some(70 * MS));
        look_at(&mut activity, &[(old[1], 10_100), (new[1], 90)], 400);
        assert_eq!(activity.of(new[1]), Some(CpuTime { all_ns: 40 * MS, counted_ns: 20 * MS }));
        let all = CpuTime { all_ns: 190 * MS, counted_ns: 20 * MS };
        assert_eq!(activity.of_all(&Progress::default(), |_| true), all);
        look_at(&mut activity, &[], 500);
        let ended = Progress { ended_counted_ns: 90 * MS, ..Progress::default() };
        assert_eq!(activity.of_all(&ended, |_| true), all);
    }

    #[test]
    fn what_an_allocator_lacked_is_taken_off_once() {
        let mut activity = Activity::new(2, 1, false);
        let [first, second] = [0, 1].map(|exec_id| ProcessKey { start_ns: 5, tgid: 1, exec_id });
        look_at(&mut activity, &[], 100);
        look_at(&mut activity, &[(first, 10)], 200);
        activity.lacked(first, 50 * MS);
        activity.counted(first, None);
        look_at(&mut activity, &[(first, 40)], 300);
        assert_eq!(activity.of(first), Some(CpuTime { all_ns: 40 * MS, counted_ns: 30 * MS }), "before it was counted");
        activity.lacked(first, 20 * MS);
        activity.let_go(first);
        look_at(&mut activity, &[(first, 50)], 400);
        activity.counted(first, None);
        look_at(&mut activity, &[(first, 60)], 500);
        assert_eq!(activity.of(first), Some(CpuTime { all_ns: 60 * MS, counted_ns: 20 * MS }));
        // No check has seen the next program yet.
        activity.lacked(second, 5 * MS);
        look_at(&mut activity, &[(second, 100)], 600);
        assert_eq!(activity.of(second), Some(CpuTime { all_ns: 40 * MS, counted_ns: 35 * MS }));
        let all = CpuTime { all_ns: 100 * MS, counted_ns: 55 * MS };
        assert_eq!(activity.of_all(&Progress::default(), |_| true), all);
        look_at(&mut activity, &[], 700);
        let ended = Progress { ended_counted_ns: 100 * MS, ..Progress::default() };
        assert_eq!(activity.of_all(&ended, |_| true), all);
    }

    #[test]
    fn as_many_have_places_as_there_are_descriptors_within_limits() {
        assert_eq!([0, 100, 199, 1 << 20].map(places), [FEWEST_AT_ONCE, 10, 19, MOST_AT_ONCE]);
    }

    /// Whoever loads an allocator before a check has seen it use CPU time has not been idle until then.
    #[test]
    fn who_was_not_checked_yet_is_not_idle() {
        let mut activity = Activity::new(2, 1, false).with_places(1);
        let young = ProcessKey { start_ns: 5, ..process(1) };
        look_at(&mut activity, &[], 100);
        look_at(&mut activity, &[(process(3), 5)], 20_000);
        activity.lacked(young, 0);
        look_at(&mut activity, &[(young, 0), (process(3), 50)], 20_100);
        assert_eq!((idlest(&activity, 20_100), idlest(&activity, 30_100)), (None, Some(1)));
    }

    /// Checks may or may not see the next program use CPU time, and it may be no target.
    #[test]
    fn what_was_counted_before_an_exec_stays_so_if_the_next_program_ends_uncounted() {
        for (is_target, cpu_ms) in [(true, 50), (true, 70), (false, 50), (false, 70)] {
            let mut activity = Activity::new(2, 1, false);
            let [hooked, next] = [0, 1].map(|exec_id| ProcessKey { start_ns: 5, tgid: 1, exec_id });
            look_at(&mut activity, &[], 100);
            look_at(&mut activity, &[(hooked, 20)], 200);
            activity.counted(hooked, Some(20 * MS));
            look_at(&mut activity, &[(hooked, 50)], 300);
            let thread = LivingThread { process: next, memory_users: 1, cpu_ns: cpu_ms * MS };
            activity.look(&[thread], 400 * MS, |_| false, |_| is_target);
            let running = activity.of_all(&Progress::default(), |_| is_target);
            look_at(&mut activity, &[], 500);
            // The BPF programs add up targets only.
            let ended_uncounted_ns = if is_target { cpu_ms * MS } else { 0 };
            let ended = activity.of_all(&Progress { ended_uncounted_ns, ..Progress::default() }, |_| true);
            let all_ns = if is_target { cpu_ms * MS } else { 50 * MS };
            assert_eq!([running, ended], [CpuTime { all_ns, counted_ns: 30 * MS }; 2], "{is_target} {cpu_ms}");
        }
    }

    #[test]
    fn whatever_is_said_of_an_unseen_program_counts_no_cpu_time_twice() {
        let mut activity = Activity::new(2, 1, false);
        let [first, second] = [0, 1].map(|exec_id| ProcessKey { start_ns: 0, tgid: 1, exec_id });
        look_at(&mut activity, &[(first, 10_000)], 100);
        activity.counted(first, Some(10_000 * MS));
        look_at(&mut activity, &[(first, 10_030)], 200);
        activity.given_up(second);
        look_at(&mut activity, &[(second, 10_050)], 300);
        assert!(activity.due(300 * MS).is_empty(), "it is not hooked again");
        // News of the previous program come late.
        activity.counted(first, Some(10_060 * MS));
        activity.given_up(first);
        look_at(&mut activity, &[(second, 10_060)], 400);
        let all = CpuTime { all_ns: 60 * MS, counted_ns: 30 * MS };
        assert_eq!(activity.of_all(&Progress::default(), |_| true), all);
        look_at(&mut activity, &[], 500);
        assert_eq!(activity.of_all(&Progress::default(), |_| true), all);
    }

    /// The process began before the recording, and no check sees its last program.
    #[test]
    fn what_a_missed_program_used_is_known_at_its_end() {
        let mut activity = Activity::new(2, 1, true);
        let [first, second] = [0, 1].map(|exec_id| ProcessKey { start_ns: 0, tgid: 1, exec_id });
        look_at(&mut activity, &[(first, 100)], 100);
        activity.counted(first, None);
        look_at(&mut activity, &[(first, 120)], 200);
        activity.missed(second);
        activity.missed(first);
        activity.ended(second, 150 * MS);
        // What this one used before the recording is not known.
        activity.missed(process(2));
        activity.ended(process(2), 1000 * MS);
        look_at(&mut activity, &[], 300);
        let all = CpuTime { all_ns: 50 * MS, counted_ns: 20 * MS };
        assert_eq!(activity.of_all(&Progress::default(), |_| true), all);
    }

    #[test]
    fn whoever_is_given_up_takes_nothing_off_the_others() {
        let mut activity = Activity::new(2, 1, false);
        let process = ProcessKey { tgid: 1, start_ns: 5, ..ProcessKey::default() };
        look_at(&mut activity, &[], 100);
        look_at(&mut activity, &[(process, 10)], 200);
        activity.counted(process, None);
        look_at(&mut activity, &[(process, 40)], 300);
        activity.given_up(process);
        look_at(&mut activity, &[(process, 90)], 400);
        look_at(&mut activity, &[], 500);
        let ended = Progress { ended_counted_ns: 50 * MS, ended_uncounted_ns: 90 * MS, ..Progress::default() };
        assert_eq!(activity.of_all(&ended, |_| true), CpuTime { all_ns: 140 * MS, counted_ns: 80 * MS });
    }

    #[test]
    fn hooking_keeps_its_budget() {
        let mut activity = Activity::new(2, 1, false);
        look(&mut activity, &[], 100);
        assert_eq!(look(&mut activity, &[(1, 5)], 200), [1]);
        activity.spend(405 * MS);
        assert_eq!(activity.next_ns() / MS, 450, "2 ms are saved in 100 ms");
        activity.spend(45 * MS);
        assert!(look(&mut activity, &[(1, 50)], 300).is_empty(), "2 ms were saved since");
        assert_eq!(activity.next_ns() / MS, 1900, "the longest pause");
        assert_eq!(look(&mut activity, &[(1, 80)], 3000), [1]);
    }

    #[test]
    fn looks_come_often_while_somebody_new_is_busy() {
        let mut activity = Activity::new(2, 1, false);
        let mut pause = |cpu_ms: &[(u32, u64)], now_ms: u64| {
            look(&mut activity, cpu_ms, now_ms);
            activity.next_ns() / MS - now_ms
        };
        assert_eq!([pause(&[(1, 5)], 100), pause(&[(1, 5)], 200), pause(&[(1, 5)], 400)], [100, 200, 400]);
        assert_eq!([pause(&[(1, 5)], 800), pause(&[(1, 5)], 1600), pause(&[(1, 5)], 3200)], [800, 1600, 1600]);
        assert_eq!(pause(&[(1, 25)], 4800), 100);
    }

    #[test]
    fn whoever_is_no_target_keeps_nobody_awake() {
        let mut activity = Activity::new(2, 1, true);
        look(&mut activity, &[], 100);
        assert_eq!(look(&mut activity, &[(1, 5)], 200), [1]);
        activity.pass_over(process(1), 200 * MS);
        assert!(look(&mut activity, &[(1, 50)], 300).is_empty());
        assert_eq!(activity.next_ns() / MS, 500);
        // It may have become a target since.
        assert!(look(&mut activity, &[(1, 70)], 1700).is_empty());
        assert_eq!((activity.next_ns() / MS, look(&mut activity, &[(1, 90)], 1800)), (1800, vec![1]));
        activity.rest(1800 * MS);
        assert_eq!(activity.next_ns() / MS, 3400);
    }

    #[test]
    fn so_many_are_hooked_at_once() {
        let mut activity = Activity::new(2, 1, false).with_places(2);
        look(&mut activity, &[], 100);
        let due = look(&mut activity, &[(1, 5), (2, 5), (3, 5)], 200);
        assert_eq!((due.len(), has_another(&activity)), (3, true));
        due[..2].iter().for_each(|tgid| activity.counted(process(*tgid), None));
        assert!(!has_another(&activity) && activity.has_place(due[0], &HashSet::new()), "it has one");
        look(&mut activity, &[(due[1], 5), (3, 5)], 300);
        assert!(has_another(&activity), "one has ended");
    }

    #[test]
    fn who_is_taken_in_between_checks_has_a_place_once() {
        let mut activity = Activity::new(2, 1, true).with_places(3);
        [1, 2].iter().for_each(|pid| activity.took_in(*pid));
        let has_place =
            |activity: &Activity, pid, promised: &[u32]| activity.has_place(pid, &promised.iter().copied().collect());
        assert!(has_another(&activity) && !has_place(&activity, 3, &[5]), "the third place is promised");
        assert!(has_place(&activity, 2, &[5]), "it has one");
        assert!(has_place(&activity, 5, &[5]), "it is the one that was promised it");
        assert!(has_place(&activity, 3, &[2]), "the second one has one place");
        let threads = [1, 2].map(|tgid| LivingThread { process: process(tgid), memory_users: 1, cpu_ns: MS });
        activity.look(&threads, 100 * MS, |process| process.tgid == 1, |_| true);
        assert!(has_place(&activity, 4, &[5]) && !has_place(&activity, 4, &[5, 6]), "the second one is not counted");
        [1, 3].iter().for_each(|pid| activity.took_in(*pid));
        assert!(has_another(&activity), "the first one has one place");
    }

    #[test]
    fn who_has_ended_leaves_its_place_before_the_next_check() {
        let mut activity = Activity::new(2, 1, false).with_places(2);
        look(&mut activity, &[], 100);
        look(&mut activity, &[(1, 5)], 200);
        activity.counted(process(1), None);
        activity.took_in(2);
        assert!(!has_another(&activity));
        activity.ended(process(2), MS);
        activity.took_in(3);
        assert!(!has_another(&activity));
        activity.ended(process(1), 6 * MS);
        assert!(has_another(&activity));
        // Another process has the same id.
        activity.took_in(1);
        assert!(!has_another(&activity));
    }

    /// The first two of these processes are hooked and fill all places. The third one waits.
    fn full(cpu_ms: [u64; 3]) -> Activity {
        let mut activity = Activity::new(2, 1, false).with_places(2);
        look(&mut activity, &[], 100);
        let [first, second, third] = cpu_ms;
        look(&mut activity, &[(1, first), (2, second), (3, third)], 200);
        [1, 2].iter().for_each(|tgid| activity.counted(process(*tgid), None));
        assert!(!has_another(&activity));
        activity
    }

    /// Whether a process without a place gets one.
    fn has_another(activity: &Activity) -> bool {
        activity.has_place(99, &HashSet::new())
    }

    fn idlest(activity: &Activity, now_ms: u64) -> Option<u32> {
        activity.idlest_for(process(3), now_ms * MS, |process| process.tgid != 9).map(|process| process.tgid)
    }

    #[test]
    fn who_has_been_idle_longest_makes_way_for_who_is_busy() {
        let mut activity = full([5, 5, 5]);
        assert_eq!(look(&mut activity, &[(1, 5), (2, 30), (3, 5)], 5_200), [3], "it waits");
        look(&mut activity, &[(1, 5), (2, 30), (3, 80)], 10_100);
        assert_eq!(idlest(&activity, 10_100), None, "nobody has been idle for ten seconds");
        look(&mut activity, &[(1, 5), (2, 30), (3, 95)], 10_200);
        assert_eq!(idlest(&activity, 10_200), Some(1));
        look(&mut activity, &[(1, 5), (2, 30), (3, 110)], 15_200);
        assert_eq!(idlest(&activity, 15_200), Some(1), "it has been idle longer than the second one");
        // It could not be stopped.
        activity.stays(process(1), 15_200 * MS);
        assert_eq!(idlest(&activity, 15_200), Some(2));
        look(&mut activity, &[(1, 5), (2, 30), (3, 111)], 15_300);
        assert_eq!(idlest(&activity, 15_300), None, "a process that uses little is not worth it");
    }

    #[test]
    fn who_is_being_prepared_has_a_place_and_is_counted_once_it_is_hooked() {
        let mut activity = Activity::new(2, 1, false).with_places(1);
        look(&mut activity, &[], 100);
        assert_eq!(look(&mut activity, &[(1, 50), (3, 20)], 200), [1, 3]);
        assert!(activity.prepares(process(1), 200 * MS) && activity.is_being_prepared(process(1)));
        assert!(!has_another(&activity) && activity.awaits_hooks(process(1)));
        // A check finds the first of its allocators hooked.
        let threads = [(1, 60), (3, 50)].map(|(tgid, ms)| (process(tgid), ms * MS));
        let threads = threads.map(|(process, cpu_ns)| LivingThread { process, memory_users: 1, cpu_ns });
        activity.look(&threads, 20_000 * MS, |process| process.tgid == 1, |_| true);
        assert_eq!(activity.due(20_000 * MS), [process(3)]);
        assert_eq!(idlest(&activity, 40_000), None, "whoever is being prepared is not let go");
        activity.counted(process(1), Some(70 * MS));
        look(&mut activity, &[(1, 90), (3, 80)], 40_100);
        assert_eq!(activity.of(process(1)), Some(CpuTime { all_ns: 90 * MS, counted_ns: 20 * MS }));
        assert!(!has_another(&activity) && !activity.awaits_hooks(process(1)));
    }

    #[test]
    fn who_cannot_be_prepared_or_is_given_up_loses_its_place() {
        let mut activity = Activity::new(2, 1, false).with_places(1);
        look(&mut activity, &[], 100);
        look(&mut activity, &[(1, 5), (2, 5)], 200);
        assert!(activity.prepares(process(1), 200 * MS) && activity.prepares(process(1), 300 * MS));
        assert_eq!([1, 7].map(|tgid| activity.prepared_for_ns(process(tgid), 300 * MS)), [100 * MS, 0]);
        assert!(!activity.prepares(process(1), 200 * MS + PREPARED_WITHIN_NS), "it takes too long");
        activity.pass_over(process(1), 20_000 * MS);
        assert!(has_another(&activity) && activity.awaits_hooks(process(1)));
        assert!(activity.prepares(process(1), 40_000 * MS) && activity.prepares(process(2), 40_000 * MS));
        activity.postponed(process(2), 40_000 * MS);
        activity.given_up(process(1));
        assert!(has_another(&activity) && !activity.awaits_hooks(process(1)) && activity.awaits_hooks(process(2)));
        assert!(!activity.prepares(process(7), 40_000 * MS), "it has ended");
    }

    #[test]
    fn so_many_are_prepared_at_once() {
        let mut activity = Activity::new(2, 1, false);
        look(&mut activity, &[], 100);
        let busy: Vec<(u32, u64)> = (0..=MOST_PREPARED as u32).map(|tgid| (tgid, 5)).collect();
        let due = look(&mut activity, &busy, 200);
        assert_eq!(due.len(), MOST_PREPARED + 1);
        assert!(due[1..].iter().all(|tgid| !activity.is_spent() && activity.prepares(process(*tgid), 200 * MS)));
        assert!(activity.is_spent() && look(&mut activity, &busy, 300).is_empty());
        activity.counted(process(due[1]), None);
        activity.refused(process(due[2]));
        assert_eq!((activity.is_spent(), look(&mut activity, &busy, 400)), (false, vec![due[0]]));
    }

    #[test]
    fn who_waits_to_be_stopped_keeps_nobody_from_being_prepared() {
        let mut activity = Activity::new(2, 1, false);
        look(&mut activity, &[], 100);
        let busy: Vec<(u32, u64)> = (0..=MOST_PREPARED as u32).map(|tgid| (tgid, 5)).collect();
        let due = look(&mut activity, &busy, 200);
        assert!(due[1..].iter().all(|tgid| activity.prepares(process(*tgid), 200 * MS)));
        let recent_ms = RECENT_NS / MS;
        assert!(look(&mut activity, &busy, 199 + recent_ms).is_empty());
        assert_eq!(look(&mut activity, &busy, 200 + recent_ms), [due[0]]);
        assert!(due[1..].iter().all(|tgid| activity.is_being_prepared(process(*tgid))));
    }

    #[test]
    fn what_a_named_process_used_with_only_some_of_its_hooks_is_not_counted() {
        let mut activity = Activity::new(2, 1, true);
        let named = ProcessKey { tgid: 1, start_ns: 5, ..ProcessKey::default() };
        look_at(&mut activity, &[], 100);
        let thread = LivingThread { process: named, memory_users: 1, cpu_ns: 10 * MS };
        activity.look(&[thread], 200 * MS, |_| true, |_| true);
        activity.counted_late(named, 30 * MS, Some(40 * MS));
        look_at(&mut activity, &[(named, 50)], 300);
        assert_eq!(activity.of(named), Some(CpuTime { all_ns: 50 * MS, counted_ns: 10 * MS }));
    }

    #[test]
    fn who_may_not_go_stays() {
        let mut activity = Activity::new(2, 1, false).with_places(1);
        look(&mut activity, &[], 100);
        look(&mut activity, &[(9, 5), (3, 5)], 200);
        activity.counted(process(9), None);
        look(&mut activity, &[(9, 5), (3, 50)], 20_000);
        assert_eq!(idlest(&activity, 20_000), None);
        assert!(activity.idlest_for(process(3), 20_000 * MS, |_| true).is_some());
    }

    #[test]
    fn who_was_let_go_is_hooked_again_once_it_is_active_and_keeps_its_counted_time() {
        let mut activity = full([0, 5, 5]);
        look(&mut activity, &[(1, 40), (2, 5), (3, 5)], 300);
        activity.let_go(process(1));
        activity.counted(process(3), None);
        let share = |activity: &Activity| activity.of(process(1)).unwrap();
        assert_eq!(share(&activity), CpuTime { all_ns: 40 * MS, counted_ns: 40 * MS });
        assert!(look(&mut activity, &[(1, 40), (2, 5), (3, 5)], 400).is_empty(), "it is idle");
        assert_eq!(look(&mut activity, &[(1, 50), (2, 5), (3, 5)], 500), [1]);
        activity.counted(process(1), Some(52 * MS));
        look(&mut activity, &[(1, 60), (2, 5), (3, 5)], 600);
        assert_eq!(share(&activity), CpuTime { all_ns: 60 * MS, counted_ns: 48 * MS });
        activity.given_up(process(1));
        look(&mut activity, &[(1, 90), (2, 5), (3, 5)], 700);
        assert_eq!(share(&activity), CpuTime { all_ns: 90 * MS, counted_ns: 48 * MS });
        look(&mut activity, &[], 800);
        let all = activity.of_all(&Progress::default(), |_| true);
        assert_eq!(all.counted_ns, 48 * MS, "those of the others were counted before anything was used");
    }
}
