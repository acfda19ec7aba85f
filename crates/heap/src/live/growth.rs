//! Growth of each row since a mark: the blocks allocated after it that are still in use, minus the older blocks freed
//! after it.
//!
//! These are different blocks, so their errors are independent. Blocks in use throughout are in neither.

use std::collections::VecDeque;

use heapbpf_statistics::growth::Growth;
use heapbpf_statistics::sums::SampleSums;

use super::{Heap, LiveSample};

/// Each mark follows the one before by at least the time from the first event to that mark, divided by this.
const SPACING: u64 = 4;
/// Time from the first event to the first mark, in nanoseconds.
const FIRST_NS: u64 = 1_000_000;

/// Moments from which growth can be measured (CLOCK_MONOTONIC). Only the marks in the later half of the time are kept,
/// which are few.
#[derive(Default)]
pub(super) struct Marks {
    first_event_ns: Option<u64>,
    last_event_ns: u64,
    times_ns: VecDeque<u64>,
}

impl Marks {
    /// Records an event. Events of different processors may arrive slightly out of order, so a mark is at the time of
    /// the latest event: no event before a mark is later than it.
    pub(super) fn note(&mut self, time_ns: u64) {
        let first_ns = *self.first_event_ns.get_or_insert(time_ns);
        self.last_event_ns = self.last_event_ns.max(time_ns);
        let passed = |at_ns: u64| at_ns.saturating_sub(first_ns);
        let next_ns = self.times_ns.back().map_or(FIRST_NS, |&last_ns| passed(last_ns) + passed(last_ns) / SPACING);
        if passed(self.last_event_ns) < next_ns {
            return;
        }
        self.times_ns.push_back(self.last_event_ns);
        let half_ns = first_ns + passed(self.last_event_ns) / 2;
        while self.times_ns.front().is_some_and(|&mark_ns| mark_ns < half_ns) {
            self.times_ns.pop_front();
        }
    }

    /// Returns the mark from which growth up to `now_ns` is measured: the first one in the later half of the time, or
    /// the start of that half if nothing has happened in it. `None` without events.
    pub(super) fn since(&self, now_ns: u64) -> Option<u64> {
        let first_ns = self.first_event_ns?;
        let half_ns = first_ns + now_ns.saturating_sub(first_ns) / 2;
        if self.last_event_ns <= half_ns {
            return Some(half_ns);
        }
        self.times_ns.iter().find(|&&mark_ns| mark_ns >= half_ns).or(self.times_ns.back()).copied()
    }

    /// Time of the last event.
    pub(super) const fn last_event_ns(&self) -> u64 {
        self.last_event_ns
    }

    /// Marks from `from_ns` up to, but not including, `until_ns`.
    fn between(&self, from_ns: u64, until_ns: u64) -> impl Iterator<Item = u64> + '_ {
        // Usually none: most blocks are freed soon.
        let is_between = move |mark_ns: &u64| (from_ns..until_ns).contains(mark_ns);
        self.times_ns.iter().copied().filter(is_between)
    }
}

/// A row's growth since each mark, apart from its live blocks: what was freed, and what was in use when its process
/// ended.
#[derive(Clone, Debug, Default)]
pub(super) struct Curve(Vec<(u64, Growth)>);

impl Curve {
    /// The growth since a mark.
    pub(super) fn since(&self, mark_ns: u64) -> Growth {
        self.0.iter().find(|(at_ns, _)| *at_ns == mark_ns).map(|(_, growth)| *growth).unwrap_or_default()
    }

    /// Same as [`Curve::since`], but mutable. Drops marks from before `oldest_ns` when it adds one.
    fn since_mut(&mut self, mark_ns: u64, oldest_ns: u64) -> &mut Growth {
        let at = self.0.iter().position(|(at_ns, _)| *at_ns == mark_ns).unwrap_or_else(|| {
            self.0.retain(|(at_ns, _)| *at_ns >= oldest_ns);
            self.0.push((mark_ns, Growth::default()));
            self.0.len() - 1
        });
        &mut self.0[at].1
    }

    /// Adds another row's curve.
    pub(super) fn add(&mut self, other: &Self) {
        for (mark_ns, growth) in &other.0 {
            self.since_mut(*mark_ns, 0).add(growth);
        }
    }
}

impl Heap {
    /// The moment since which a snapshot at `now_ns` measures growth (CLOCK_MONOTONIC); `None` if nothing was
    /// allocated.
    pub fn growth_since(&self, now_ns: u64) -> Option<u64> {
        self.marks.since(now_ns)
    }

    /// Records that a block is no longer in use.
    pub(super) fn note_freed(&mut self, live: &LiveSample, at_ns: u64) {
        self.note_change(live, live.time_ns, at_ns, |growth, block| growth.freed.add(block));
    }

    /// Records that a mapping lost a part: `lost` has the bytes of the part. The mapping counts as an object only when
    /// it is freed.
    pub(super) fn note_shrunk(&mut self, lost: &LiveSample, at_ns: u64) {
        self.note_change(lost, lost.time_ns, at_ns, |growth, part| {
            // Samples and bytes do not match any more, so there is no common size.
            let largest_bytes = u64::MAX;
            growth.freed.add(&SampleSums { objects: 0.0, objects_variance: 0.0, largest_bytes, ..*part });
        });
    }

    /// Records that a block stays in use after the end of its process.
    pub(super) fn note_left(&mut self, live: &LiveSample) {
        self.note_change(live, 0, live.time_ns, |growth, block| growth.kept.add(block));
    }

    fn note_change(&mut self, live: &LiveSample, from_ns: u64, until_ns: u64, add: impl Fn(&mut Growth, &SampleSums)) {
        let Self { rows, marks, .. } = self;
        let row = &mut rows[live.row as usize];
        let oldest_ns = marks.times_ns.front().copied().unwrap_or(0);
        for mark_ns in marks.between(from_ns, until_ns) {
            let mut sums = SampleSums::NONE;
            sums.record(live.size_bytes, live.trials, live.offset, row.key.interval);
            // Whether the parts of a mapping were sampled was one event, so only the first part that was freed since the
            // mark counts as a sample.
            if (live.time_ns..live.shrunk_ns).contains(&mark_ns) {
                sums.samples = 0;
            }
            add(row.curve.since_mut(mark_ns, oldest_ns), &sums);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{process, sample, stack};
    use super::*;
    use crate::sample::Sample;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn marks_are_few_and_one_is_near_half_of_the_time() {
        let mut marks = Marks::default();
        let begin = 7 * SECOND;
        for step in 0..100_000_u64 {
            let now = begin + step * 10_000_000;
            marks.note(now);
            assert!(marks.times_ns.len() <= 5, "{step}");
            let since = marks.since(now).expect("an event") - begin;
            let passed = step * 10_000_000;
            let most = passed / 2 + passed / 2 / SPACING + 20_000_000;
            assert!(step < 10 || (passed / 2..=most).contains(&since), "{passed}: {since}");
        }
        assert_eq!(marks.since(marks.last_event_ns + 10_000 * SECOND), Some(begin + 5_499_995_000_000));
        assert_eq!(Marks::default().since(5), None);
    }

    /// Each second, one block of 8 bytes is kept and another one lives for three seconds. A cache fills up in the first
    /// ten.
    #[test]
    fn a_leak_grows_and_neither_sessions_nor_a_full_cache_do() {
        let (mut heap, [leak, session, cache]) = (Heap::default(), [stack(), stack(), stack()]);
        let mut id = 0;
        let mut allocate = |heap: &mut Heap, at: u64, of: &_| {
            id += 1;
            heap.allocate(Sample { time_ns: at * SECOND, ..sample(id, 1, 8, of) });
            id
        };
        let mut sessions = Vec::new();
        for at in 1..=60 {
            allocate(&mut heap, at, &leak);
            sessions.push(allocate(&mut heap, at, &session));
            if at <= 10 {
                allocate(&mut heap, at, &cache);
            }
            if at > 3 {
                heap.free(process(1), sessions[at as usize - 4], at * SECOND, false);
            }
        }
        let since = heap.growth_since(60 * SECOND).expect("events") / SECOND;
        assert!((30..=38).contains(&since), "{since}");
        let grown = |heap: &mut Heap| -> Vec<[u64; 2]> {
            let rows = heap.snapshot(60 * SECOND, true);
            rows.map(|it| it.growth.expect("growth")).map(|it| [it.kept.samples, it.freed.samples]).collect()
        };
        assert_eq!(grown(&mut heap), [[60 - since, 0], [3, 3], [0, 0]]);
        // What was in use when its process ended stays in use, unless it is reported separately.
        heap.end(process(1), 60 * SECOND, |_| true);
        assert_eq!(grown(&mut heap), [[60 - since, 0], [3, 3], [0, 0]]);
    }

    #[test]
    fn growth_is_what_in_use_has_grown_by() {
        let (mut heap, one) = (Heap::new(true), stack());
        let mut inuse_at = Vec::new();
        let mut random = 1_u64;
        for id in 1..=4_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            heap.allocate(Sample { time_ns: id * SECOND, ..sample(id, 1, 64 + (random >> 60), &one) });
            if random >> 63 == 1 {
                heap.free(process(1), 1 + (random >> 33) % id, id * SECOND + 1, false);
            }
            inuse_at.push(heap.snapshot(id * SECOND + 2, false).next().expect("a row").inuse.bytes);
        }
        let now = 4_000 * SECOND + 2;
        let since = heap.growth_since(now).expect("events");
        let growth = heap.snapshot(now, true).next().and_then(|it| it.growth).expect("growth");
        let before = inuse_at[(since / SECOND) as usize - 1];
        // The mark is at an event: what was freed right after it belongs to the growth.
        let change = growth.kept.bytes - growth.freed.bytes;
        assert!((change - (inuse_at[3_999] - before)).abs() <= 80.0 && growth.freed.samples > 100, "{change}");
        heap.end(process(1), now, |_| true);
        let growth = heap.snapshot(now, true).next().and_then(|it| it.growth).expect("growth");
        assert_eq!(growth.kept, SampleSums::default(), "what an ended process held is told apart");
    }
}
