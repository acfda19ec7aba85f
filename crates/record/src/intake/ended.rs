//! Exact counts of exited processes. Little is kept per process, because a burst of short-lived processes leaves
//! thousands of them in the profile.

use std::collections::{HashMap, HashSet};
use std::ops::Add;

use sampler_ebpf::abi::{Counters, ProcessKey};

use super::counters;
use super::losses::LostSamples;

/// Exact counts of a process's allocations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exact {
    /// Bytes requested.
    pub bytes: u64,
    /// Number of allocations.
    pub objects: u64,
    /// Samples lost among them.
    pub lost: LostSamples,
}

impl Exact {
    /// Computes the counts from a process's counters.
    pub fn of(counters: &Counters) -> Self {
        Self {
            bytes: counters::exact_bytes(counters),
            objects: counters::exact_objects(counters),
            lost: LostSamples::of(counters),
        }
    }
}

impl Add for Exact {
    type Output = Self;

    fn add(self, more: Self) -> Self {
        Self { bytes: self.bytes + more.bytes, objects: self.objects + more.objects, lost: self.lost.with(more.lost) }
    }
}

/// Counts of exited processes, moved out of the kernel: their sum, and one line per process for the profile.
#[derive(Debug, Default)]
pub struct EndedCounts {
    total: Counters,
    lines: HashMap<ProcessKey, Exact>,
}

impl EndedCounts {
    /// Adds the counts of an exited process to a line, its own or a shared one. No line is made if there was no call.
    pub fn add(&mut self, line: ProcessKey, counters: &Counters) {
        self.total.add(counters);
        if counters.hits() > 0 {
            let line = self.lines.entry(line).or_default();
            *line = *line + Exact::of(counters);
        }
    }

    /// Sum over all exited processes, including those without a line.
    pub const fn total(&self) -> &Counters {
        &self.total
    }

    /// Counts in a process's line, if there is one.
    pub fn get(&self, process: &ProcessKey) -> Option<Exact> {
        self.lines.get(process).copied()
    }

    /// Keys of the lines. Only processes that called an allocator have one.
    pub fn processes(&self) -> impl Iterator<Item = &ProcessKey> {
        self.lines.keys()
    }

    /// Number of lines.
    pub fn lines(&self) -> usize {
        self.lines.len()
    }

    /// Removes lines. The total keeps their counts.
    pub fn forget(&mut self, processes: &HashSet<ProcessKey>) {
        for process in processes {
            self.lines.remove(process);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(tgid: u32) -> ProcessKey {
        ProcessKey { start_ns: 1, tgid, exec_id: 0 }
    }

    #[test]
    fn lines_can_be_shared_and_forgotten_and_the_total_stays() {
        let calls = |calls, bytes| Counters {
            calls,
            unsampled: calls,
            unsampled_bytes: bytes,
            threads: 1,
            ..Counters::default()
        };
        let mut ended = EndedCounts::default();
        ended.add(key(1), &calls(2, 20));
        ended.add(key(2), &calls(1, 5));
        ended.add(key(2), &calls(3, 7));
        ended.add(key(3), &calls(0, 0));
        assert_eq!(ended.get(&key(2)), Some(Exact { bytes: 12, objects: 4, ..Exact::default() }));
        assert_eq!((ended.get(&key(3)), ended.lines()), (None, 2));
        ended.forget(&HashSet::from([key(1), key(9)]));
        assert_eq!(ended.processes().collect::<Vec<_>>(), [&key(2)]);
        assert_eq!(*ended.total(), Counters { threads: 4, ..calls(6, 32) });
    }

    #[test]
    fn a_call_that_failed_has_a_line_that_says_nothing() {
        let mut ended = EndedCounts::default();
        ended.add(key(1), &Counters { calls: 1, sampled: 1, failed: 1, ..Counters::default() });
        assert_eq!(ended.get(&key(1)), Some(Exact::default()));
    }
}
