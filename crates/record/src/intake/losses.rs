//! Bounds on the effect of lost records on each process's figures, from counters of the kernel side. Also keeps the
//! exact counts of exited processes. Little is kept per process, because a burst of short-lived processes leaves
//! thousands of them in the profile.

use std::collections::{HashMap, HashSet};

use heapbpf_kernel::totals::Counts;
use heapbpf_profile::model::{LossBound, Losses};
use sampler_ebpf::abi::{Counters, ProcessKey};

use super::counters;

/// No mapping is smaller.
const SMALLEST_PAGE: u64 = 4096;

/// Samples that a process lost for good, according to its counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LostSamples {
    /// Allocations without a record.
    pub alloc: LossBound,
    /// Blocks that are not tracked, because the live map was full or the call's result is unknown.
    pub unfollowed: LossBound,
    /// Bytes of address ranges whose unmapping was not reported.
    pub unmapped_bytes: u64,
    /// Whether any record of an allocation or a free was lost.
    pub records: bool,
}

impl LostSamples {
    /// Computes the losses from a process's counters.
    pub fn of(counters: &Counters) -> Self {
        let calls = counters.lost_abandoned + counters.lost_result_unreadable;
        let blocks = |samples, sampled_bytes| LossBound { samples, sampled_bytes };
        Self {
            alloc: blocks(
                counters.lost_ring_full + calls,
                counters.lost_ring_full_bytes.saturating_add(counters.lost_call_bytes),
            ),
            unfollowed: blocks(
                counters.untracked + counters.mappings_lost + calls,
                counters
                    .untracked_bytes
                    .saturating_add(counters.mappings_lost_bytes)
                    .saturating_add(counters.lost_call_bytes),
            ),
            // It may be unknown how far a brk moved the end of the heap.
            unmapped_bytes: match (counters.unmaps_lost, counters.system_calls_lost) {
                (0, _) => 0,
                (_, 0) => counters.unmaps_lost_bytes,
                _ => u64::MAX,
            },
            records: lossy(counters),
        }
    }

    /// Sum with the losses from another set of counters.
    #[must_use]
    pub fn with(mut self, other: Self) -> Self {
        self.alloc.add(&other.alloc);
        self.unfollowed.add(&other.unfollowed);
        self.unmapped_bytes = self.unmapped_bytes.saturating_add(other.unmapped_bytes);
        self.records |= other.records;
        self
    }
}

/// Whether records of a process were lost.
const fn lossy(counters: &Counters) -> bool {
    counters.lost_ring_full + counters.frees_lost + counters.unmaps_lost > 0
}

/// Losses settled by the last reconciliation with the kernel's live map. Records lost since then are still unsettled.
#[derive(Debug, Default)]
pub struct LossLedger {
    /// Records lost up to that reconciliation, over all processes.
    pub records_lost: u64,
    /// Counters at that reconciliation, of processes that had lost records.
    base: HashMap<ProcessKey, Counters>,
    /// Bytes that reconciliations found unmapped.
    found: HashMap<ProcessKey, FoundUnmapped>,
}

/// Memory of a process that was found unmapped although no record reported it.
#[derive(Clone, Copy, Debug, Default)]
struct FoundUnmapped {
    bytes: u64,
    /// Moment of the last reconciliation (CLOCK_MONOTONIC).
    until_ns: u64,
}

impl LossLedger {
    /// Notes a reconciliation: it settled all losses up to the time at which these counters were read.
    pub fn reconciled(&mut self, records_lost: u64, counts: Counts) {
        self.records_lost = records_lost;
        self.found.retain(|process, _| counts.processes.contains_key(process));
        self.base = counts.processes.into_iter().filter(|(_, counters)| lossy(counters)).collect();
    }

    /// Processes that lost unmappings since the last reconciliation.
    pub fn with_lost_unmaps(&self, counts: &Counts) -> HashSet<ProcessKey> {
        let unmaps_before = |process| self.base.get(process).map_or(0, |counters| counters.unmaps_lost);
        let lost = counts.processes.iter().filter(|(process, now)| now.unmaps_lost > unmaps_before(process));
        lost.map(|(process, _)| *process).collect()
    }

    /// Notes that a reconciliation at `until_ns` found bytes unmapped.
    pub fn found_unmapped(&mut self, process: ProcessKey, bytes: u64, until_ns: u64) {
        let found = self.found.entry(process).or_default();
        found.bytes = found.bytes.saturating_add(bytes);
        found.until_ns = until_ns;
    }

    /// Bound on the sampled mappings that may have been unmapped although figures in use include them: something else
    /// may be mapped in their place now. `mapped_by`: the remaining mappings that were made up to a given time. The
    /// other arguments are those of [`LossLedger::losses`].
    pub fn stale_mappings(
        &self,
        process: &ProcessKey,
        counting: Option<&Counters>,
        ended: LostSamples,
        mapped_by: impl FnOnce(u64) -> LossBound,
    ) -> LossBound {
        let lost_bytes = counting.map(LostSamples::of).unwrap_or_default().with(ended).unmapped_bytes;
        let found = self.found.get(process).copied().unwrap_or_default();
        let unexplained = lost_bytes.saturating_sub(found.bytes);
        if unexplained == 0 {
            return LossBound::default();
        }
        let Some(now) = counting else {
            return LossBound { samples: unexplained.div_ceil(SMALLEST_PAGE), sampled_bytes: unexplained };
        };
        let settled = self.base.get(process).is_some_and(|then| then.unmaps_lost == now.unmaps_lost);
        let mapped = mapped_by(if settled { found.until_ns } else { u64::MAX });
        LossBound { samples: mapped.samples, sampled_bytes: mapped.sampled_bytes.min(unexplained) }
    }

    /// Bounds on what a process's figures may lack or wrongly include. `counting`: its counters, if they are still in
    /// the kernel. `ended`: its losses by counters that were already moved out of the kernel. `recovered`: the part of
    /// these losses that reconciliations recovered.
    pub fn losses(
        &self,
        process: &ProcessKey,
        counting: Option<&Counters>,
        ended: LostSamples,
        recovered: LossBound,
    ) -> Losses {
        let lost = counting.map(LostSamples::of).unwrap_or_default().with(ended);
        let mut losses = Losses {
            alloc: lost.alloc.without(&recovered),
            inuse_missing: lost.unfollowed,
            peak_unknown: lost.records,
            ..Losses::default()
        };
        if let Some(now) = counting {
            let then = self.base.get(process).copied().unwrap_or_default();
            losses.inuse_missing.add(&LossBound {
                samples: now.lost_ring_full.saturating_sub(then.lost_ring_full),
                sampled_bytes: now.lost_ring_full_bytes.saturating_sub(then.lost_ring_full_bytes),
            });
            losses.inuse_stale = LossBound {
                samples: now.frees_lost.saturating_sub(then.frees_lost),
                sampled_bytes: now.frees_lost_bytes.saturating_sub(then.frees_lost_bytes),
            };
        }
        losses
    }
}

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

    /// Sum with other counts.
    #[must_use]
    pub fn with(self, more: Self) -> Self {
        Self { bytes: self.bytes + more.bytes, objects: self.objects + more.objects, lost: self.lost.with(more.lost) }
    }
}

/// Counts of exited processes, moved out of the kernel: their sum, and one line per process for the profile.
#[derive(Debug, Default)]
pub struct EndedCounts {
    /// Sum over all exited processes, including those without a line.
    pub total: Counters,
    lines: HashMap<ProcessKey, Exact>,
}

impl EndedCounts {
    /// Adds the counts of an exited process to a line, its own or a shared one. No line is made if there was no call.
    pub fn add(&mut self, line: ProcessKey, counters: &Counters) {
        self.total.add(counters);
        if counters.hits() > 0 {
            let line = self.lines.entry(line).or_default();
            *line = line.with(Exact::of(counters));
        }
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

    const PROCESS: ProcessKey = ProcessKey { start_ns: 1, tgid: 1, exec_id: 0 };

    fn bound(samples: u64, sampled_bytes: u64) -> LossBound {
        LossBound { samples, sampled_bytes }
    }

    #[test]
    fn without_losses_nothing_is_uncertain() {
        let counters = Counters { sampled: 9, submitted: 8, failed: 1, ..Counters::default() };
        let losses =
            LossLedger::default().losses(&PROCESS, Some(&counters), LostSamples::default(), LossBound::default());
        assert!(losses.is_none());
    }

    #[test]
    fn what_a_reconciliation_covers_is_certain_again_and_what_it_found_is_not_missing() {
        let lost = Counters {
            lost_ring_full: 10,
            lost_ring_full_bytes: 1000,
            lost_abandoned: 1,
            lost_call_bytes: 7,
            frees_lost: 4,
            frees_lost_bytes: 400,
            untracked: 2,
            untracked_bytes: 20,
            ..Counters::default()
        };
        let mut ledger = LossLedger::default();
        let none = LostSamples::default();
        let before = ledger.losses(&PROCESS, Some(&lost), none, LossBound::default());
        assert_eq!(before.alloc, bound(11, 1007));
        assert_eq!((before.inuse_missing, before.inuse_stale), (bound(13, 1027), bound(4, 400)));
        assert!(before.peak_unknown);

        ledger.reconciled(14, Counts { processes: [(PROCESS, lost)].into(), ..Counts::default() });
        assert_eq!(ledger.records_lost, 14);
        let later = Counters { frees_lost: 5, frees_lost_bytes: 450, ..lost };
        let after = ledger.losses(&PROCESS, Some(&later), none, bound(6, 600));
        assert_eq!(after.alloc, bound(5, 407));
        assert_eq!((after.inuse_missing, after.inuse_stale), (bound(3, 27), bound(1, 50)));
        // Lost mappings are not in the live map, so no reconciliation finds them.
        let mappings = Counters { mappings_lost: 2, mappings_lost_bytes: 8000, ..later };
        let missing = ledger.losses(&PROCESS, Some(&mappings), none, LossBound::default()).inuse_missing;
        assert_eq!(missing, bound(5, 8027));
        // Its counters have been moved out of the kernel.
        let ended = ledger.losses(&PROCESS, None, LostSamples::of(&later), bound(6, 600));
        assert_eq!((ended.alloc, ended.inuse_missing, ended.inuse_stale), (bound(5, 407), bound(3, 27), bound(0, 0)));
    }

    #[test]
    fn mappings_are_uncertain_as_far_as_nothing_explains_lost_unmappings() {
        let lost = Counters { unmaps_lost: 2, unmaps_lost_bytes: 30_000, ..Counters::default() };
        let counts = |counters| Counts { processes: [(PROCESS, counters)].into(), ..Counts::default() };
        let mapped = |until_ns: u64| bound(if until_ns < 100 { 3 } else { 9 }, until_ns.min(50_000));
        let none = LostSamples::default();
        let mut ledger = LossLedger::default();
        assert_eq!(ledger.with_lost_unmaps(&counts(lost)), HashSet::from([PROCESS]));
        assert_eq!(ledger.stale_mappings(&PROCESS, Some(&Counters::default()), none, mapped), bound(0, 0));
        assert_eq!(ledger.stale_mappings(&PROCESS, Some(&lost), none, mapped), bound(9, 30_000));
        // A reconciliation finds a part of it. Something else was mapped where the rest was.
        ledger.found_unmapped(PROCESS, 12_000, 77);
        ledger.reconciled(2, counts(lost));
        assert!(ledger.with_lost_unmaps(&counts(lost)).is_empty());
        assert_eq!(ledger.stale_mappings(&PROCESS, Some(&lost), none, mapped), bound(3, 77));
        let more = Counters { unmaps_lost: 3, ..lost };
        assert_eq!(ledger.stale_mappings(&PROCESS, Some(&more), none, mapped), bound(9, 18_000));
        let of_brk = Counters { system_calls_lost: 1, ..more };
        assert_eq!(ledger.stale_mappings(&PROCESS, Some(&of_brk), none, mapped), bound(9, 50_000));
        assert_eq!(ledger.stale_mappings(&PROCESS, None, LostSamples::of(&lost), mapped), bound(5, 18_000));
        ledger.found_unmapped(PROCESS, 18_000, 88);
        assert_eq!(ledger.stale_mappings(&PROCESS, Some(&lost), none, mapped), bound(0, 0));
        ledger.reconciled(2, Counts::default());
        assert_eq!(ledger.stale_mappings(&PROCESS, Some(&lost), none, mapped), bound(9, 30_000), "it was forgotten");
    }

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
        assert_eq!(ended.total, Counters { threads: 4, ..calls(6, 32) });
    }

    #[test]
    fn a_call_that_failed_has_a_line_that_says_nothing() {
        let mut ended = EndedCounts::default();
        ended.add(key(1), &Counters { calls: 1, sampled: 1, failed: 1, ..Counters::default() });
        assert_eq!(ended.get(&key(1)), Some(Exact::default()));
    }
}
