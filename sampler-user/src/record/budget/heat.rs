//! Which processes make so many calls that they are to be hooked inline, and when that is tried. Pure.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};

use sampler_ebpf::abi::{Counters, ProcessKey};

use crate::attach::inline::attempts::Attempts;

/// Calls of allocation functions per second from which on a process is hot. Below, probes take less than about a thousandth of
/// a CPU.
const HOT_CALLS_PER_SECOND: f64 = 1000.0;
/// Fewest calls after which a process is hooked: by then, its probes have taken as much time as hooking it takes. So whatever it does next,
/// both together take at most twice what the better choice would have.
const FEWEST_CALLS: u64 = 3000;
/// Most processes that are hooked inline at once. Each has links of its own, which take time to make and to remove, and is stopped
/// a few times, for about a millisecond.
const MOST_AT_ONCE: usize = 512;

/// For how long a budget waits for hot processes to be hooked, ns.
const LONGEST_WAIT_NS: u64 = 5_000_000_000;

/// Calls of allocation functions that passed probes.
fn probed_calls(counters: &Counters) -> u64 {
    counters.hits().saturating_sub(counters.counted_inside + counters.inline_sampled)
}

/// What is known of a process.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    calls: u64,
    attempts: Attempts,
    /// Not to be tried before (CLOCK_MONOTONIC); `u64::MAX`: never again.
    not_before_ns: u64,
    is_hooked: bool,
}

/// How hot processes are, and which are to be tried.
#[derive(Debug, Default)]
pub struct Heat {
    processes: HashMap<ProcessKey, Known>,
    looked_ns: u64,
    looks: u32,
    due: VecDeque<ProcessKey>,
    /// Whether the last look found processes that the one before did not.
    has_new: bool,
    /// How many hot processes the last look found that may be hooked, now or later.
    waiting: usize,
    /// Since when there are some (CLOCK_MONOTONIC).
    waiting_since_ns: Option<u64>,
}

impl Heat {
    /// Looks at the counters. The hottest processes are due then.
    pub fn look<'a>(&mut self, counts: impl Iterator<Item = (&'a ProcessKey, &'a Counters)>, now_ns: u64) {
        let seconds = now_ns.saturating_sub(self.looked_ns) as f64 * 1e-9;
        let is_first = self.looked_ns == 0;
        self.looked_ns = now_ns;
        self.looks = self.looks.saturating_add(1);
        self.waiting = 0;
        self.has_new = false;
        let mut hot = Vec::new();
        let mut before = std::mem::take(&mut self.processes);
        for (process, counters) in counts {
            let calls = probed_calls(counters);
            let mut known = before.remove(process).unwrap_or_else(|| {
                self.has_new = true;
                Known::default()
            });
            let rate = calls.saturating_sub(known.calls) as f64 / seconds;
            known.calls = calls;
            let is_hot = rate > HOT_CALLS_PER_SECOND && calls >= FEWEST_CALLS;
            if !is_first && is_hot && known.not_before_ns != u64::MAX {
                self.waiting += 1;
                if known.not_before_ns <= now_ns {
                    hot.push((Reverse(rate as u64), *process));
                }
            }
            self.processes.insert(*process, known);
        }
        let hooked = self.processes.values().filter(|known| known.is_hooked).count();
        hot.sort_unstable();
        let due = hot.into_iter().map(|(_, process)| process);
        self.due = due.take(MOST_AT_ONCE.saturating_sub(hooked)).collect();
    }

    /// Whether hot processes are about to be hooked, or the first looks may find some: what probes take now says little then. Not
    /// for long: where new ones come all the time, a budget must be kept all the same.
    pub fn is_about_to_cool(&mut self, now_ns: u64) -> bool {
        if self.looks >= 2 && self.waiting == 0 {
            self.waiting_since_ns = None;
            return false;
        }
        let since_ns = *self.waiting_since_ns.get_or_insert(now_ns);
        now_ns.saturating_sub(since_ns) < LONGEST_WAIT_NS
    }

    /// Whether the last look found processes that the one before did not: of those, some may get hot soon.
    pub fn has_new(&self) -> bool {
        self.has_new
    }

    /// The next process that is to be tried.
    pub fn next_due(&mut self) -> Option<ProcessKey> {
        self.due.pop_front()
    }

    /// Whether processes are to be tried now.
    pub fn is_due(&self) -> bool {
        !self.due.is_empty()
    }

    /// A process was hooked. What probes still see of it may be another allocator that it loads later.
    pub fn hooked(&mut self, process: ProcessKey) {
        let known = self.processes.entry(process).or_default();
        (known.is_hooked, known.attempts) = (true, Attempts::default());
    }

    /// A process could not be hooked now. Whether it is tried again.
    pub fn postponed(&mut self, process: ProcessKey, now_ns: u64) -> bool {
        let known = self.processes.entry(process).or_default();
        let pause = known.attempts.failed();
        known.not_before_ns = pause.map_or(u64::MAX, |pause| now_ns + pause.as_nanos() as u64);
        pause.is_some()
    }

    /// A process stays on probes.
    pub fn refused(&mut self, process: ProcessKey) {
        self.processes.entry(process).or_default().not_before_ns = u64::MAX;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn process(tgid: u32) -> ProcessKey {
        ProcessKey { tgid, ..ProcessKey::default() }
    }

    fn counts(calls: &[(u32, u64)]) -> Vec<(ProcessKey, Counters)> {
        calls.iter().map(|(tgid, calls)| (process(*tgid), Counters { calls: *calls, ..Counters::default() })).collect()
    }

    fn look(heat: &mut Heat, calls: &[(u32, u64)], now_ns: u64) -> Vec<u32> {
        let counts = counts(calls);
        heat.look(counts.iter().map(|(process, counters)| (process, counters)), now_ns);
        std::iter::from_fn(|| heat.next_due()).map(|process| process.tgid).collect()
    }

    #[test]
    fn the_hottest_are_tried_first_and_quiet_ones_never() {
        let mut heat = Heat::default();
        // What was counted before the first look says nothing of a rate.
        assert!(look(&mut heat, &[(1, 1_000_000), (2, 0)], SECOND).is_empty());
        let calls = [(1, 1_000_900), (2, 2_900), (3, 9_000), (4, 8_000), (5, 7_000), (6, 6_000), (7, 5_000)];
        assert_eq!(look(&mut heat, &calls, 2 * SECOND), [3, 4, 5, 6, 7]);
        assert!(heat.has_new());
        // It has made enough calls now, and still makes them fast enough.
        let calls = [(1, 1_001_800), (2, 4_000), (3, 9_000)];
        assert_eq!(look(&mut heat, &calls, 3 * SECOND), [2]);
        assert!(!heat.has_new());
    }

    #[test]
    fn what_is_counted_inside_is_no_heat() {
        let counters = Counters { calls: 5_000, counted_inside: 4_000, inline_sampled: 500, ..Counters::default() };
        assert_eq!(probed_calls(&counters), 500);
    }

    #[test]
    fn a_failure_is_tried_again_after_a_pause_and_a_refusal_never() {
        let mut heat = Heat::default();
        assert!(look(&mut heat, &[(1, 0), (2, 0)], SECOND).is_empty());
        assert_eq!(look(&mut heat, &[(1, 9_000), (2, 8_000)], 2 * SECOND), [1, 2]);
        heat.refused(process(1));
        let mut now_ns = 2 * SECOND;
        let mut attempts = 1;
        while heat.postponed(process(2), now_ns) {
            now_ns += 10 * SECOND;
            let calls = 100_000 * attempts;
            assert_eq!(look(&mut heat, &[(1, calls), (2, calls)], now_ns), [2]);
            attempts += 1;
        }
        assert_eq!(attempts, 12);
        assert!(look(&mut heat, &[(1, 1 << 40), (2, 1 << 40)], now_ns + SECOND).is_empty());
    }

    #[test]
    fn a_budget_waits_for_the_hot_but_not_for_long() {
        let mut heat = Heat::default();
        assert!(heat.is_about_to_cool(SECOND / 5), "nothing is known yet");
        look(&mut heat, &[(1, 0), (2, 0)], SECOND / 2);
        look(&mut heat, &[(1, 9_000), (2, 0)], 2 * SECOND);
        assert!(heat.is_about_to_cool(2 * SECOND));
        heat.hooked(process(1));
        look(&mut heat, &[(1, 9_000), (2, 0)], 3 * SECOND);
        assert!(!heat.is_about_to_cool(3 * SECOND));
        look(&mut heat, &[(1, 9_000), (2, 9_000)], 4 * SECOND);
        assert!(heat.is_about_to_cool(4 * SECOND) && heat.is_about_to_cool(8 * SECOND));
        look(&mut heat, &[(1, 9_000), (2, 90_000)], 9 * SECOND);
        assert!(!heat.is_about_to_cool(9 * SECOND), "it has waited long enough");
        heat.refused(process(2));
        look(&mut heat, &[(1, 9_000), (2, 900_000)], 10 * SECOND);
        assert!(!heat.is_about_to_cool(10 * SECOND), "it stays on probes");
    }

    #[test]
    fn so_many_are_hooked_at_once() {
        let mut heat = Heat::default();
        let all: Vec<(u32, u64)> = (1..=600).map(|tgid| (tgid, 0)).collect();
        assert!(look(&mut heat, &all, SECOND).is_empty());
        let mut hooked = Vec::new();
        for round in 1..10 {
            let calls = |tgid: &u32| if hooked.contains(tgid) { 0 } else { 5_000 * round };
            let all: Vec<(u32, u64)> = (1..=600).map(|tgid| (tgid, calls(&tgid))).collect();
            let due = look(&mut heat, &all, (1 + round) * SECOND);
            due.iter().for_each(|tgid| heat.hooked(process(*tgid)));
            hooked.extend(due);
        }
        assert_eq!(hooked.len(), MOST_AT_ONCE);
    }
}
