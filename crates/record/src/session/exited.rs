//! Exited processes: those whose counts have not been folded in yet, and those whose rows have not been moved to the
//! overflow bucket yet.

use std::collections::HashSet;

use sampler_ebpf::abi::ProcessKey;

use crate::intake::ended::EndedCounts;

/// Maximum number of exited processes without samples that have a line of their own in the profile; the others share
/// one.
const MOST_UNSAMPLED_LINES: usize = 4096;

/// The line of the profile that the counts of an exited process go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// A line that it already has: from its samples, or from counts folded in before.
    Known,
    /// A line of its own.
    New,
    /// The line that many processes share.
    Shared,
}

/// Exited processes.
#[derive(Default)]
pub(super) struct ExitedProcesses {
    /// Processes whose counts have not been folded in yet, and when their end was reported (CLOCK_MONOTONIC).
    uncounted: Vec<(ProcessKey, u64)>,
    /// Counts that have been folded in.
    pub(super) counts: EndedCounts,
    /// Processes whose rows are still to be moved to the overflow bucket.
    pub(super) retiring: HashSet<ProcessKey>,
}

impl ExitedProcesses {
    /// Notes that a process, or its generation before an exec, ended. `now_ns`: when that was reported.
    pub(super) fn note(&mut self, process: ProcessKey, now_ns: u64) {
        self.uncounted.push((process, now_ns));
    }

    /// Takes the processes whose counts are due: those whose end was reported by `before_ns`.
    pub(super) fn take_due(&mut self, before_ns: u64) -> Vec<ProcessKey> {
        let (due, later): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.uncounted).into_iter().partition(|(_, at_ns)| *at_ns <= before_ns);
        self.uncounted = later;
        due.into_iter().map(|(process, _)| process).collect()
    }

    /// Puts processes back whose counts could not be taken: they are due at once.
    pub(super) fn put_back(&mut self, processes: impl IntoIterator<Item = ProcessKey>) {
        self.uncounted.extend(processes.into_iter().map(|process| (process, 0)));
    }

    /// The line that a process's counts go to. `sampled`: it had samples; `keeps_running`: lines of exited processes do
    /// not stay.
    pub(super) fn line_of(&self, process: &ProcessKey, sampled: bool, keeps_running: bool) -> Line {
        if sampled || self.counts.get(process).is_some() {
            Line::Known
        } else if keeps_running || self.counts.lines() < MOST_UNSAMPLED_LINES {
            Line::New
        } else {
            Line::Shared
        }
    }

    /// Releases the memory that many short-lived processes took up.
    pub(super) fn shrink(&mut self) {
        self.uncounted.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use sampler_ebpf::abi::Counters;

    use super::*;

    fn key(tgid: u32) -> ProcessKey {
        ProcessKey { start_ns: 1, tgid, exec_id: 0 }
    }

    #[test]
    fn counts_are_due_some_time_after_the_end_was_heard_of() {
        let mut exited = ExitedProcesses::default();
        exited.note(key(1), 100);
        exited.note(key(2), 200);
        assert!(exited.take_due(99).is_empty());
        assert_eq!(exited.take_due(100), [key(1)]);
        assert_eq!(exited.take_due(500), [key(2)]);
        assert!(exited.take_due(500).is_empty(), "each once");
    }

    #[test]
    fn a_storm_of_processes_without_samples_shares_a_line() {
        let mut exited = ExitedProcesses::default();
        let called = Counters { calls: 1, unsampled: 1, ..Counters::default() };
        assert_eq!(exited.line_of(&key(1), false, false), Line::New);
        for tgid in 0..MOST_UNSAMPLED_LINES as u32 {
            exited.counts.add(key(tgid), &called);
        }
        let new = key(1 << 20);
        assert_eq!(exited.line_of(&new, false, false), Line::Shared);
        assert_eq!(exited.line_of(&new, true, false), Line::Known, "samples have a line in any case");
        assert_eq!(exited.line_of(&key(0), false, false), Line::Known, "its last threads");
        assert_eq!(exited.line_of(&new, false, true), Line::New, "in a service lines do not stay");
    }
}
