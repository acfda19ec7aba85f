//! Which processes are hooked inline next: the busiest that are not counted yet. Allocating takes CPU time, so a
//! process that uses none has nothing to show, and costs nothing as long as it is not hooked. If too many are hooked,
//! the one that has been idle longest makes way. Pure.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use heapbpf_attach::inline::attempts::Attempts;
use sampler_ebpf::abi::{LivingThread, ProcessKey, Progress};

/// Time between checks while uncounted processes are busy, ns. Otherwise the time doubles from check to check.
const SHORTEST_PAUSE_NS: u64 = 100_000_000;
/// Longest time between checks while a process may have to be hooked, ns: it may be busy for so long before it is seen.
const QUIET_PAUSE_NS: u64 = 800_000_000;
/// Longest time between other checks, and time for which a process that was passed over is not considered, ns.
const LONGEST_PAUSE_NS: u64 = 1_600_000_000;
/// A process that used less CPU time is not hooked, ns: starting alone takes that much.
const LEAST_CPU_NS: u64 = 1_000_000;
/// Share of the host's CPU time that hooking may take.
const SHARE: f64 = 0.01;
/// The same for checks: they read all threads of the host.
const CHECKS_SHARE: f64 = 0.005;
/// Maximum that hooking may take at once, at the start and after a quiet time, ns: enough to hook many processes within
/// the first second.
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
#[derive(Debug, Default)]
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
            began_ns,
            saved_ns: MOST_SAVED_NS,
            processors: processors as f64,
            places: MOST_AT_ONCE,
            least_ns: if are_named { 1 } else { LEAST_CPU_NS },
            pause_ns: SHORTEST_PAUSE_NS,
            ..Self::default()
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
        let mut before = std::mem::replace(&mut self.processes, HashMap::with_capacity(cpu.len()));
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
                // One that was passed over is looked at again at its time, and says nothing about others.
                is_any_new_busy |= known.not_before_ns == 0;
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
            false => (2 * self.pause_ns).min(QUIET_PAUSE_NS),
        };
        self.next_ns = (now_ns + self.pause_ns).min(retry_ns).max(self.may_hook_ns());
    }

    /// Notes that the last check took this much CPU time, ns. The next one comes later if that was much.
    pub fn check_took(&mut self, ns: u64) {
        let pause_ns = (ns as f64 / (self.processors * CHECKS_SHARE)) as u64;
        self.next_ns = self.next_ns.max(self.looked_ns + pause_ns.min(LONGEST_PAUSE_NS));
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
            let cpu = known.cpu();
            // Most have used none, and asking may take several reads of /proc.
            if cpu != CpuTime::default() && is_target(*process) {
                sum.add(cpu);
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
#[path = "activity_tests.rs"]
mod tests;
