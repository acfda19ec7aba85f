//! Who is profiled, and since when its allocators are hooked: the source of each process's coverage.

use std::collections::{HashMap, HashSet};

/// What is known of a target process, by its process id.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tracked {
    /// Nanoseconds of its life in the recording during which an allocator that it had was not hooked yet.
    pub uncovered_ns: u64,
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
    /// Processes in the recording, by process id.
    pub tracked: HashMap<u32, Tracked>,
    /// Named targets and their children that still live: when this empties, the recording is over.
    pub awaited: HashSet<u32>,
}

impl TargetSet {
    /// A process comes into the recording.
    pub fn begin(&mut self, pid: u32, since_ns: u64) {
        self.tracked.insert(pid, Tracked { since_ns, ..Tracked::default() });
    }

    /// Notes that an allocator which a process had since `had_ns` is hooked now.
    pub fn hooked(&mut self, pid: u32, had_ns: u64, now_ns: u64) {
        let tracked = self.tracked.entry(pid).or_insert(Tracked { since_ns: had_ns, ..Tracked::default() });
        tracked.hooked = true;
        tracked.uncovered_ns += now_ns.saturating_sub(had_ns.max(tracked.since_ns));
    }

    /// A process ended.
    pub fn end(&mut self, pid: u32, now_ns: u64) {
        self.awaited.remove(&pid);
        if let Some(tracked) = self.tracked.get_mut(&pid) {
            tracked.until_ns = Some(now_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
