//! A counted process: where its counts are, how far they were read, and what they add to the kernel's.

use std::fs::File;
use std::io;
use std::time::Instant;

use heapbpf_host::clock::{monotonic_ns, suspended_ns};
use heapbpf_host::side_by_side::online_processors;
use heapbpf_inline::read::Counts;
use sampler_ebpf::abi::inline::{InlineProcess, inline_state};
use sampler_ebpf::abi::{Counters, ProcessKey};

use crate::inline::figures::{self, KernelSampled};
use crate::inline::memory;

/// A counted process.
#[derive(Default)]
pub(super) struct Process {
    /// Where the hooks of its allocators are.
    pub(super) bases: Vec<u64>,
    /// Its memory, if it can be read. `None` after its end, or if it runs in another process's memory.
    pub(super) memory: Option<File>,
    pub(super) memory_of: ProcessKey,
    /// The process whose hooks it has: itself or an ancestor. `None` if its hooks were removed for a while.
    pub(super) hooked: Option<ProcessKey>,
    /// Its counts from before that.
    pub(super) before: Counts,
    /// Its counts as of the last two reads.
    pub(super) counts: [Counts; 2],
    /// For each read, whether it had left its memory by then. If so, the counts are final.
    pub(super) had_left: [bool; 2],
    /// Since when the counts have been unreadable although it is running.
    pub(super) unread_since: Option<Instant>,
    /// Whether something else removed its hooks.
    pub(super) was_taken_out: bool,
    /// Whether these are its own counts, made in another process's memory.
    pub(super) counts_apart: bool,
    /// Sampled calls by exited processes that ran in its memory and whose own counts are not known.
    pub(super) seen_of_others: KernelSampled,
    /// The known counts of other processes in its memory.
    pub(super) of_others: Counts,
    /// Maximum CPU time that it can have used, and when that was determined (CLOCK_BOOTTIME), both in nanoseconds; and
    /// the CPU time of the exited processes in its memory.
    pub(super) cpu_ns: (u64, u64),
    pub(super) cpu_ns_of_others: u64,
    /// Whether its own counts are impossible. Then only what the kernel saw counts.
    pub(super) is_distrusted: bool,
}

/// Where the hooks of its allocators are.
pub(super) fn bases(entry: &InlineProcess) -> Vec<u64> {
    entry.bases.into_iter().filter(|base| *base != 0).collect()
}

impl Process {
    pub(super) fn new(process: ProcessKey, entry: &InlineProcess) -> Self {
        let own = entry.memory_of == process && entry.state != inline_state::LEFT;
        Self {
            bases: bases(entry),
            memory: own.then(|| memory::open(process.tgid).ok()).flatten(),
            memory_of: entry.memory_of,
            hooked: Some(entry.hooked),
            cpu_ns: (0, process.start_ns),
            ..Self::default()
        }
    }

    /// Reads its current counts.
    ///
    /// # Errors
    /// They cannot be read. `InvalidData`: something else has cleared them, or written there.
    pub(super) fn now(&self) -> io::Result<Counts> {
        let memory = self.memory.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let is_original = self.hooked == Some(self.memory_of);
        let mut counts = self.bases.iter().map(|base| memory::counts(memory, *base, is_original));
        let now = counts.try_fold(self.before, |sum, counts| Ok::<_, io::Error>(figures::plus(&sum, &counts?)))?;
        if now.threads < self.counts[1].threads { Err(io::ErrorKind::InvalidData.into()) } else { Ok(now) }
    }

    /// Keeps its counts as they are: its hooks are removed.
    pub(super) fn loses_hooks(&mut self) {
        self.note_cpu_time(None);
        (self.memory, self.counts[0], self.had_left) = (None, self.counts[1], [true; 2]);
    }

    /// Lets its counts go on, if it has no hooks: it is hooked again.
    pub(super) fn has_hooks_again(&mut self, process: ProcessKey) {
        if self.hooked.is_none() {
            (self.hooked, self.memory, self.before) = (Some(process), memory::open(process.tgid).ok(), self.counts[1]);
            (self.had_left, self.unread_since) = ([false; 2], None);
        }
    }

    /// Whether it has left its memory by an exit or an exec.
    pub(super) const fn has_left(&self) -> bool {
        self.had_left[1]
    }

    /// Notes how much CPU time it can have used by now: the reading of its clock (`used`, in seconds), or otherwise the
    /// time since the last reading on all CPUs.
    pub(super) fn note_cpu_time(&mut self, used: Option<f64>) {
        /// How far a process's clock can lag for each CPU that is running the process: the longest tick.
        const TICK_NS: u64 = 10_000_000;
        let late_ns = TICK_NS * online_processors() as u64;
        let now_ns = monotonic_ns() + suspended_ns();
        let since_ns = now_ns.saturating_sub(self.cpu_ns.1).saturating_mul(online_processors() as u64);
        let most_ns = used.map_or(self.cpu_ns.0.saturating_add(since_ns), |used| (used * 1e9) as u64 + late_ns);
        self.cpu_ns = (most_ns.max(self.cpu_ns.0), now_ns);
    }

    /// Takes over the counts that the kernel read when the process left its memory. Returns whether they are complete.
    pub(super) fn leave(&mut self, entry: &InlineProcess) -> bool {
        self.memory = None;
        self.had_left[1] = true;
        self.note_cpu_time(None);
        if self.is_distrusted {
            return true;
        }
        let last = figures::plus(&self.before, &Counts::from(&entry.counts));
        // In a child, pages that it never touched are missing. Bytes cannot be compared, because a failed call takes
        // back what it requested.
        let is_complete = last.calls >= self.counts[1].calls;
        if is_complete {
            self.counts[1] = last;
        }
        is_complete
    }

    /// Returns what to add to the kernel's counters. These include `seen` of its sampled calls, and were read between
    /// the last two reads, or after its end (`has_ended`). `samples_all` says that all calls are sampled. `cpu_ns` is
    /// the CPU time of others that run in its memory. Impossible counts are ignored, permanently. `is_final` says that
    /// the kernel's counters were read some time after its end.
    pub(super) fn addition(
        &mut self,
        (seen, cpu_ns): (KernelSampled, u64),
        has_ended: bool,
        samples_all: bool,
        is_final: bool,
    ) -> Counters {
        let mut seen_here = seen;
        seen_here.add(self.seen_of_others);
        let cpu_ns = [cpu_ns, self.cpu_ns.0, self.cpu_ns_of_others].into_iter().fold(0, u64::saturating_add);
        let mut own = self.counts.map(|counts| figures::minus(&counts, &self.of_others));
        // Before its end, samples may be in counters that were read a moment earlier.
        let seen = is_final.then_some(seen_here);
        self.is_distrusted |= !figures::are_possible(&own, cpu_ns, seen);
        if self.is_distrusted {
            own = [Counts::default(); 2];
        }
        let [before, now] = if samples_all { own.map(|counts| figures::of_every_call(&counts)) } else { own };
        figures::difference(if has_ended { &now } else { &before }, &now, seen_here, has_ended)
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use heapbpf_inline::abi::{STATE, Totals};
    use heapbpf_inline::read::COUNTS_BYTES;

    use super::*;

    #[test]
    fn emptied_counts_are_those_of_a_child_or_nobody_elses() {
        let [own, parent] = [std::process::id(), 1].map(|tgid| ProcessKey { tgid, ..ProcessKey::default() });
        let mut state = vec![0_u64; COUNTS_BYTES / size_of::<u64>()];
        let mut read = |is_original| {
            state[offset_of!(Totals, is_original) / size_of::<u64>()] = is_original;
            let base = std::hint::black_box(&state).as_ptr() as u64 - STATE;
            [own, parent].map(|hooked| {
                let mut entry = InlineProcess { memory_of: own, hooked, ..InlineProcess::default() };
                entry.bases[0] = base;
                Process::new(own, &entry).now().map_err(|error| error.kind())
            })
        };
        let (none, refused) = (Ok(Counts::default()), Err(io::ErrorKind::InvalidData));
        assert_eq!([read(1), read(0), read(7)], [[none, none], [refused, none], [refused, none]]);
    }

    /// A process whose last read happened during a call that then failed.
    #[test]
    fn a_call_that_fails_after_the_last_read_is_in_no_figure() {
        let process = ProcessKey { tgid: 1, ..ProcessKey::default() };
        let mut entry = InlineProcess { state: inline_state::LEFT, memory_of: process, ..InlineProcess::default() };
        let mut known = Process::new(process, &entry);
        let before =
            Counts { calls: 3, bytes: (1 << 46) + 200, sampled: 2, reported: 2, threads: 1, ..Counts::default() };
        known.counts = [before; 2];
        (entry.counts.calls, entry.counts.bytes, entry.counts.failed) = (3, 200, 1);
        assert!(known.leave(&entry));
        assert_eq!((known.counts[1].bytes, known.counts[1].failed), (200, 1));
        entry.counts.calls = 2;
        assert!(!known.leave(&entry), "a part of it was not read");
    }

    #[test]
    fn counts_of_a_process_that_is_hooked_again_go_on_where_they_were() {
        let process = ProcessKey { tgid: u32::MAX, ..ProcessKey::default() };
        let mut entry = InlineProcess { state: inline_state::LEFT, memory_of: process, ..InlineProcess::default() };
        let mut known = Process::new(process, &entry);
        let counts = |calls| Counts { calls, bytes: 100 * calls, threads: 1, ..Counts::default() };
        known.counts = [counts(2), counts(3)];
        known.loses_hooks();
        known.hooked = None;
        assert_eq!((known.counts, known.has_left()), ([counts(3); 2], true));
        known.has_hooks_again(process);
        assert!(!known.has_left() && known.hooked == Some(process));
        // The new hooks count from zero.
        (entry.counts.calls, entry.counts.bytes) = (4, 400);
        assert!(known.leave(&entry));
        assert_eq!((known.counts[1].calls, known.counts[1].bytes), (7, 700));
    }
}
