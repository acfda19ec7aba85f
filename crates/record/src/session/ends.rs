//! Ends of lives: what the session does when a process ends or executes another program, whichever channel reports it.
//! Also keeps the exited processes whose counts have not been folded in yet, or whose rows have not been moved to the
//! overflow bucket yet.

use std::collections::HashSet;

use heapbpf_host::clock::{monotonic_ns, suspended_ns};
use heapbpf_host::processes::starts_agree;
use heapbpf_kernel::KernelError;
use heapbpf_kernel::totals::living;
use sampler_ebpf::abi::{LivingThread, ProcessKey};

use super::errors::Step;
use super::state::Session;
use crate::intake::lives::{Census, End};
use crate::intake::losses::EndedCounts;

/// Time within which the record of an end follows the host's event.
const RECORD_FOLLOWS_NS: u64 = 1_000_000_000;

impl Session {
    /// Passes on which process generations have had their first sample.
    pub(super) fn note_new_lives(&mut self) {
        let new = std::mem::take(&mut self.recorder.new_lives);
        new.into_iter().for_each(|(process, time_ns)| self.lives.begin(process, time_ns));
    }

    /// Handles a process generation that ended with an exec.
    pub(super) fn replaced(&mut self, ended: ProcessKey, time_ns: u64) {
        self.recorder.poll(&mut self.host);
        let replaced = self.host.processes().replaced_at(ended.tgid, time_ns).map(|generation| generation.since_ns);
        let sampled = self.recorder.processes.get(&ended).copied();
        let at_ns = sampled.or(replaced).unwrap_or(time_ns);
        self.descriptions.note(ended, at_ns, &mut self.host, &self.attaching);
        self.replace_heap(ended, time_ns);
        self.exited.note(ended, monotonic_ns());
        self.attaching.replaced(ended);
        let seen = self.attaching.targets.seen_before(ended.tgid, time_ns);
        self.descriptions.ended(ended, seen, self.attaching.cpu_share(ended));
    }

    /// Handles a process that ended. Its id may have been reused since, if the end was found late.
    pub(super) fn exited(&mut self, process: ProcessKey, time_ns: u64) {
        self.descriptions.note(process, time_ns, &mut self.host, &self.attaching);
        self.end_heap(process, time_ns);
        let now = monotonic_ns();
        self.exited.note(process, now);
        let current = self.host.processes().current(process.tgid).map(|current| current.info.start_ns);
        if current.is_none_or(|start_ns| starts_agree(start_ns, process.start_ns)) {
            self.attaching.ended(process.tgid, time_ns, &self.host);
        }
        let seen = self.attaching.targets.seen(process.tgid, now);
        self.descriptions.ended(process, seen, self.attaching.cpu_share(process));
    }

    /// Ends programs whose inline hooks were removed while they ran, and of which there was no sample: no record
    /// reports their ends. `threads`: all that live.
    pub(super) fn end_unlisted(&mut self, threads: &[LivingThread], now_ns: u64) {
        let Some(inline) = &mut self.attaching.inline else { return };
        let living: HashSet<ProcessKey> = threads.iter().map(|thread| thread.process).collect();
        let mut ended = inline.forget_ended(&living);
        // The ends of the others are reported by a record or found by a census.
        ended.retain(|process| !self.recorder.processes.contains_key(process));
        for process in ended {
            let has_replaced = |it: &ProcessKey| (it.tgid, it.start_ns) == (process.tgid, process.start_ns);
            if living.iter().any(has_replaced) {
                if self.lives.end(process, End::Exec, now_ns) {
                    self.replaced(process, now_ns);
                }
            } else if self.lives.end(process, End::Exit, now_ns) {
                self.exited(process, now_ns);
                self.attaching.executed.last.remove(&process.tgid);
            }
        }
    }

    /// Lists the kernel's processes if the host reported an end that no record did, or if process events were lost.
    pub(super) fn look_for_unreported_ends(&mut self, now_ns: u64) {
        if self.cuts.census.is_some() || self.cuts.waiting.is_some() {
            return;
        }
        let up_to_ns = self.recorder.join.queue.handed_out_up_to_ns().min(now_ns.saturating_sub(RECORD_FOLLOWS_NS));
        let events_lost = self.process_events_lost();
        if self.lives.needs_census(up_to_ns, events_lost) {
            self.cuts.census = self.read_census();
        }
    }

    /// Whether the record of an end may be missing.
    pub(super) fn may_lack_ends(&mut self) -> bool {
        let events_lost = self.process_events_lost();
        self.lives.may_lack_ends(events_lost)
    }

    /// Number of process events that were lost, or may have been; 0 if it cannot be read now.
    fn process_events_lost(&mut self) -> u64 {
        if !self.may_try(Step::Census) {
            return 0;
        }
        let lost = self.kernel.totals.process_events_lost(&self.attaching.programs);
        self.errors.note(Step::Census, lost, monotonic_ns()).unwrap_or(0)
    }

    /// The processes that live now. `None` if the kernel does not list them; it is tried again a second later.
    pub(super) fn read_census(&mut self) -> Option<Census> {
        if !self.may_try(Step::Census) {
            return None;
        }
        let totals = &self.kernel.totals;
        let read = || -> Result<Census, KernelError> {
            let events_lost = totals.process_events_lost(&self.attaching.programs)?;
            // Counts are read first: a process generation that begins in between cannot be missed in the list.
            let counted = if self.lives.lacks_events(events_lost) { totals.processes_counted() } else { Vec::new() };
            let (time_ns, suspended_ns) = (monotonic_ns(), suspended_ns());
            let living = living(&self.attaching.programs)?;
            Ok(Census::new(time_ns, time_ns + suspended_ns, living).with_counted(counted, events_lost))
        };
        let census = read();
        self.errors.note(Step::Census, census, monotonic_ns())
    }

    /// Settles a census that belongs to no cut, once everything up to it has been taken in.
    pub(super) fn settle_waiting_census(&mut self) {
        let up_to_ns = self.recorder.join.queue.handed_out_up_to_ns();
        if let Some(census) = self.cuts.census.take_if(|census| census.time_ns <= up_to_ns) {
            self.settle_ends(&census);
        }
    }

    /// Ends the lives that were over at a census although no record reported it. Everything up to the census must have
    /// been taken in.
    pub(super) fn settle_ends(&mut self, census: &Census) {
        self.note_new_lives();
        let before = self.recorder.heap.estimated().live_samples;
        for (process, how) in self.lives.settle(census, monotonic_ns()) {
            log::debug!("no record reported the end of {process:?}: {how:?}");
            match how {
                End::Exec => self.replaced(process, census.time_ns),
                End::Exit => self.exited(process, census.time_ns),
            }
        }
        let counters = &mut self.recorder.counters;
        counters.blocks_of_ended += before.saturating_sub(self.recorder.heap.estimated().live_samples);
        counters.ends_found = self.lives.found();
    }
}

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
        let due = self.uncounted.extract_if(.., |(_, at_ns)| *at_ns <= before_ns);
        due.map(|(process, _)| process).collect()
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
