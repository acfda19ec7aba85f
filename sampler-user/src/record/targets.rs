//! Who is profiled, and since when its allocators are hooked: the source of each process's coverage.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// What is known of a target process, by its process id.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tracked {
    /// Nanoseconds of its life in the recording during which an allocator that it had was not hooked yet.
    pub uncovered_ns: u64,
    /// CLOCK_MONOTONIC when the last such time ended.
    gap_until_ns: u64,
    /// CLOCK_MONOTONIC when it came into the recording.
    pub since_ns: u64,
    /// CLOCK_MONOTONIC when it ended.
    pub until_ns: Option<u64>,
    /// Whether an allocator is hooked in it.
    pub hooked: bool,
}

impl Tracked {
    /// Share of its life in the recording during which its allocators were hooked.
    pub fn coverage(&self, now_ns: u64) -> f64 {
        let life = self.until_ns.unwrap_or(now_ns).saturating_sub(self.since_ns);
        if life == 0 { 1.0 } else { 1.0 - (self.uncovered_ns.min(life) as f64 / life as f64) }
    }
}

/// The targets.
#[derive(Debug, Default)]
pub struct TargetSet {
    /// Processes in the recording, by process id: the life since their last exec.
    pub tracked: HashMap<u32, Tracked>,
    /// The life before the last exec, of those that replaced their program in the recording.
    replaced: HashMap<u32, Tracked>,
    /// Named targets and their children that still live: when this empties, the recording is over.
    pub awaited: HashSet<u32>,
}

impl TargetSet {
    /// A process comes into the recording.
    pub fn begin(&mut self, pid: u32, since_ns: u64) {
        self.tracked.insert(pid, Tracked { since_ns, ..Tracked::default() });
    }

    /// What is known of a process from here on is of its life that began then: an exec began a new one, if it is not the
    /// one that is known. A gap that reaches into it stays its own: what an exec maps may be reported before the exec.
    pub fn lives_since(&mut self, pid: u32, since_ns: u64) {
        if let Some(tracked) = self.tracked.get_mut(&pid)
            && tracked.since_ns < since_ns
        {
            let uncovered_ns = tracked.uncovered_ns.min(tracked.gap_until_ns.saturating_sub(since_ns));
            let gap_until_ns = tracked.gap_until_ns;
            let hooked = uncovered_ns > 0;
            let next = Tracked { since_ns, uncovered_ns, gap_until_ns, hooked, until_ns: None };
            let begun = std::mem::replace(tracked, next);
            let uncovered_ns = begun.uncovered_ns - uncovered_ns;
            self.replaced.insert(pid, Tracked { until_ns: Some(since_ns), uncovered_ns, ..begun });
        }
    }

    /// Share of the life that an exec at that time ended which was covered.
    pub fn coverage_before(&self, pid: u32, exec_ns: u64) -> f64 {
        // The exec may have been seen by then or not.
        self.replaced.get(&pid).map_or_else(|| self.coverage(pid, exec_ns), |tracked| tracked.coverage(exec_ns))
    }

    /// Notes that an allocator which a process had since `had_ns` is hooked now.
    pub fn hooked(&mut self, pid: u32, had_ns: u64, now_ns: u64) {
        let tracked = self.tracked.entry(pid).or_insert(Tracked { since_ns: had_ns, ..Tracked::default() });
        tracked.hooked = true;
        let gap_ns = now_ns.saturating_sub(had_ns.max(tracked.since_ns));
        if gap_ns > 0 {
            tracked.uncovered_ns += gap_ns;
            tracked.gap_until_ns = tracked.gap_until_ns.max(now_ns);
        }
    }

    /// A process ended; it may be told twice.
    pub fn end(&mut self, pid: u32, now_ns: u64) {
        self.awaited.remove(&pid);
        if let Some(tracked) = self.tracked.get_mut(&pid) {
            tracked.until_ns.get_or_insert(now_ns);
        }
    }

    /// Whether a process of this id is in the recording and has not ended: ids are used again.
    pub fn is_running(&self, pid: u32) -> bool {
        self.tracked.get(&pid).is_some_and(|tracked| tracked.until_ns.is_none())
    }

    /// Share of a process's life that was covered; 1 if nothing is known of it.
    pub fn coverage(&self, pid: u32, now_ns: u64) -> f64 {
        self.tracked.get(&pid).map_or(1.0, |tracked| tracked.coverage(now_ns))
    }

    /// Forgets processes that ended before that time.
    pub fn forget(&mut self, before_ns: u64) {
        self.tracked.retain(|_, tracked| tracked.until_ns.is_none_or(|until| until >= before_ns));
        self.replaced.retain(|pid, _| self.tracked.contains_key(pid));
        // A storm of short processes leaves nothing.
        if self.tracked.len() < self.tracked.capacity() / 4 {
            self.tracked.shrink_to(2 * self.tracked.len());
        }
        self.replaced.shrink_to(2 * self.replaced.len());
    }
}

/// Targets that ended before an allocator of theirs was hooked, or soon after: nothing of them is in the profile, unless
/// their figures come yet.
#[derive(Clone, Debug, Default)]
pub struct Missed(BTreeMap<u32, Arc<str>>);

impl Missed {
    /// Most that are remembered; more than that many were a storm, and the remark says enough.
    const MOST: usize = 1 << 16;
    /// Names in the remark.
    const NAMES: usize = 5;

    /// Such a process, with its name if that is known.
    pub fn note(&mut self, pid: u32, comm: Arc<str>) {
        if self.0.len() < Self::MOST {
            let name = self.0.entry(pid).or_default();
            if !comm.is_empty() {
                *name = comm;
            }
        }
    }

    /// There are figures of it after all.
    pub fn forget(&mut self, pid: u32) {
        self.0.remove(&pid);
    }

    /// What the profile says of them; `seen` are those that have a line in it.
    pub fn remark(&self, seen: &HashSet<u32>) -> Option<String> {
        let missed: Vec<&str> = self.0.iter().filter(|(pid, _)| !seen.contains(pid)).map(|(_, name)| &**name).collect();
        let names: BTreeSet<&str> = missed.iter().copied().filter(|name| !name.is_empty()).collect();
        let named = names.iter().take(Self::NAMES).copied().collect::<Vec<_>>().join(", ");
        let others = if names.len() > Self::NAMES { ", …" } else { "" };
        let named = if named.is_empty() { named } else { format!(" ({named}{others})") };
        let (n, s) = (missed.len(), if missed.len() == 1 { "" } else { "es" });
        (n > 0).then(|| {
            format!("{n} process{s}{named} ended before an allocator could be hooked: what they allocated is missing")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ended_are_forgotten_in_time() {
        let mut targets = TargetSet::default();
        targets.begin(1, 100);
        targets.begin(2, 100);
        assert!(targets.is_running(1) && !targets.is_running(3));
        targets.end(1, 200);
        targets.end(1, 900);
        assert!(!targets.is_running(1));
        targets.forget(200);
        assert!(targets.tracked.contains_key(&1), "it may still be asked for");
        targets.forget(201);
        assert_eq!(targets.tracked.keys().collect::<Vec<_>>(), [&2]);
    }

    #[test]
    fn a_gap_that_reaches_into_the_next_life_is_told_of_that() {
        let mut targets = TargetSet::default();
        // Its program was mapped at 110 and hooked at 300; that there was an exec at 100 is heard later.
        targets.begin(1, 50);
        targets.hooked(1, 110, 300);
        targets.lives_since(1, 100);
        assert_eq!(targets.coverage(1, 500), 1.0 - 190.0 / 400.0);
        assert_eq!(targets.coverage_before(1, 100), 1.0);
        // Hooked long before the exec: nothing is missed of the next life.
        targets.begin(2, 50);
        targets.hooked(2, 60, 80);
        targets.lives_since(2, 100);
        assert_eq!((targets.coverage(2, 500), targets.coverage_before(2, 100)), (1.0, 1.0 - 20.0 / 50.0));
        // A gap that an exec divides is shared.
        targets.begin(3, 50);
        targets.hooked(3, 60, 200);
        targets.lives_since(3, 100);
        assert_eq!((targets.coverage(3, 300), targets.coverage_before(3, 100)), (0.5, 1.0 - 40.0 / 50.0));
    }

    #[test]
    fn the_missed_are_counted_and_named() {
        let mut missed = Missed::default();
        let nobody = HashSet::new();
        assert_eq!(missed.remark(&nobody), None);
        for pid in 1..=7 {
            missed.note(pid, format!("n{pid}").into());
        }
        missed.forget(1);
        let remark = missed.remark(&nobody).unwrap();
        assert!(remark.starts_with("6 processes (n2, n3, n4, n5, n6, …) ended before"), "{remark}");
        let remark = missed.remark(&HashSet::from([2, 3, 4, 5, 6])).unwrap();
        assert!(remark.starts_with("1 process (n7) ended before"), "{remark}");
    }

    #[test]
    fn coverage_is_the_share_of_life_that_was_hooked() {
        let mut tracked = Tracked { since_ns: 1000, ..Tracked::default() };
        assert_eq!(tracked.coverage(2000), 1.0);
        tracked.uncovered_ns = 250;
        assert_eq!(tracked.coverage(2000), 0.75);
        tracked.until_ns = Some(1500);
        assert_eq!(tracked.coverage(9000), 0.5);
        tracked.uncovered_ns = 9999;
        assert_eq!(tracked.coverage(9000), 0.0);
        assert_eq!(Tracked::default().coverage(0), 1.0);
    }
}
