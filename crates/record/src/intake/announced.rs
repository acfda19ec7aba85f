//! The sampling intervals of processes that announce their samples. Each sample states its weight, from which its
//! interval follows. A process has one interval. Pure.

use std::collections::{HashMap, HashSet};

use heapbpf_statistics::announced::IntervalRange;
use sampler_ebpf::abi::ProcessKey;

/// What the samples of one process say about its interval.
#[derive(Clone, Copy, Debug)]
struct Judged {
    /// The intervals with which all samples so far are possible; `None` if there is none.
    range: Option<IntervalRange>,
    /// One of them.
    interval: u64,
}

/// The sampling intervals of processes that announce their samples.
#[derive(Debug, Default)]
pub struct AnnouncedIntervals {
    of_process: HashMap<ProcessKey, Judged>,
}

impl AnnouncedIntervals {
    /// The interval of a sample of `size_bytes` that stands for `weighted_bytes`: the process's own, as long as all its
    /// samples agree on one. If they do not, the interval that gives the sample the weight that it states.
    pub fn interval(&mut self, process: ProcessKey, size_bytes: u64, weighted_bytes: u64) -> u64 {
        let range = IntervalRange::of(size_bytes, weighted_bytes);
        let first = Judged { range, interval: range.map_or(1, |range| range.nearest()) };
        let judged = self.of_process.entry(process).or_insert(first);
        judged.range = judged.range.zip(range).and_then(|(known, new)| known.with(&new));
        match judged.range {
            Some(range) => {
                if !range.contains(judged.interval) {
                    judged.interval = range.nearest();
                }
                judged.interval
            }
            // There may be as many intervals as samples, and each would be a row.
            None => range.map_or(1, |range| three_digits(range.exact.round() as u64)),
        }
    }

    /// Whether the samples of a process have no common interval.
    pub fn is_inconsistent(&self, process: &ProcessKey) -> bool {
        self.of_process.get(process).is_some_and(|judged| judged.range.is_none())
    }

    /// Drops exited processes.
    pub fn forget(&mut self, ended: &HashSet<ProcessKey>) {
        self.of_process.retain(|process, _| !ended.contains(process));
    }
}

/// Rounds a number to its first three digits; at least 1.
fn three_digits(number: u64) -> u64 {
    let unit = 10_u64.pow(number.checked_ilog10().unwrap_or(0).saturating_sub(2));
    (number.saturating_add(unit / 2) / unit * unit).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROCESS: ProcessKey = ProcessKey { start_ns: 1, tgid: 2, exec_id: 3 };

    fn stated(size: u64, interval: f64) -> u64 {
        (size as f64 / -(-(size as f64) / interval).exp_m1()) as u64
    }

    #[test]
    fn samples_of_one_process_have_one_interval() {
        let mut intervals = AnnouncedIntervals::default();
        for size in [100_u64, 16, 4096, 1 << 20, 10 << 20, 64 << 20, 100] {
            assert_eq!(intervals.interval(PROCESS, size, stated(size, 524_288.0)), 524_288, "{size}");
        }
        assert!(!intervals.is_inconsistent(&PROCESS));
        let other = ProcessKey { tgid: 5, ..PROCESS };
        assert_eq!(intervals.interval(other, 100, stated(100, 65_536.0)), 65_536);
    }

    #[test]
    fn a_large_first_sample_tells_little_and_those_that_follow_more() {
        let mut intervals = AnnouncedIntervals::default();
        let size = 10 << 20;
        assert!(intervals.interval(PROCESS, size, size) > 524_288, "sure to be taken, whatever the interval");
        let small = stated(100, 524_288.0);
        let found = intervals.interval(PROCESS, 100, small);
        assert!(found.abs_diff(524_288) <= 1, "{found}");
        assert_eq!(intervals.interval(PROCESS, size, size), found);
        assert!(!intervals.is_inconsistent(&PROCESS));
    }

    #[test]
    fn weights_by_no_common_interval_are_kept_and_told() {
        let mut intervals = AnnouncedIntervals::default();
        assert_eq!(intervals.interval(PROCESS, 100, 700_000), 699_950);
        assert_eq!(intervals.interval(PROCESS, 100_000, 524_288), 473_000, "its own, to three digits");
        assert!(intervals.is_inconsistent(&PROCESS));
        assert_eq!(intervals.interval(PROCESS, 1000, 10), 1, "it stands for itself at least");
        intervals.forget(&HashSet::from([PROCESS]));
        assert!(!intervals.is_inconsistent(&PROCESS));
    }

    #[test]
    fn three_digits_stay() {
        assert_eq!([0, 1, 999, 1004, 1005, 524_238].map(three_digits), [1, 1, 999, 1000, 1010, 524_000]);
        assert_eq!([u64::MAX / 2, u64::MAX].map(three_digits), [9_220_000_000_000_000_000, 18_400_000_000_000_000_000]);
    }
}
