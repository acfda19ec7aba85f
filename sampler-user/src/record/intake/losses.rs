//! Bounds on the effect of lost records on each process's figures, from counters of the kernel side.

use std::collections::HashMap;

use sampler_ebpf::abi::{Counters, ProcessKey};

use crate::heap::live::LostBlocks;
use crate::kernel::totals::Counts;
use heapbpf_profile::model::{LossBound, Losses};

/// Samples that a process lost for good, according to its counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LostSamples {
    /// Allocations without a record.
    pub alloc: LostBlocks,
    /// Blocks that are not tracked, because the live map was full or the call's result is unknown.
    pub unfollowed: LostBlocks,
    /// Whether any record of an allocation or a free was lost.
    pub records: bool,
}

impl LostSamples {
    /// Computes the losses from a process's counters.
    pub fn of(counters: &Counters) -> Self {
        let calls = counters.lost_abandoned + counters.lost_result_unreadable;
        let blocks = |samples, bytes| LostBlocks { samples, bytes };
        Self {
            alloc: blocks(
                counters.lost_ring_full + calls,
                counters.lost_ring_full_bytes.saturating_add(counters.lost_call_bytes),
            ),
            unfollowed: blocks(
                counters.untracked + calls,
                counters.untracked_bytes.saturating_add(counters.lost_call_bytes),
            ),
            records: counters.lost_ring_full + counters.frees_lost > 0,
        }
    }

    /// Sum with the losses from another set of counters.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self {
            alloc: sum(self.alloc, other.alloc),
            unfollowed: sum(self.unfollowed, other.unfollowed),
            records: self.records || other.records,
        }
    }
}

fn sum(a: LostBlocks, b: LostBlocks) -> LostBlocks {
    LostBlocks { samples: a.samples + b.samples, bytes: a.bytes.saturating_add(b.bytes) }
}

fn less(a: LostBlocks, b: LostBlocks) -> LossBound {
    LossBound { samples: a.samples.saturating_sub(b.samples), sampled_bytes: a.bytes.saturating_sub(b.bytes) }
}

/// Losses settled by the last reconciliation with the kernel's live map. Records lost since then are still unsettled.
#[derive(Debug, Default)]
pub struct LossLedger {
    /// Records lost up to that reconciliation, over all processes.
    records_lost: u64,
    /// Counters at that reconciliation, of processes that had lost records.
    base: HashMap<ProcessKey, Counters>,
}

impl LossLedger {
    /// Notes a reconciliation: it settled all losses up to the time at which these counters were read.
    pub fn reconciled(&mut self, records_lost: u64, counts: Counts) {
        self.records_lost = records_lost;
        let lossy = |counters: &Counters| counters.lost_ring_full + counters.frees_lost > 0;
        self.base = counts.processes.into_iter().filter(|(_, counters)| lossy(counters)).collect();
    }

    /// Records lost up to the last reconciliation, over all processes.
    pub const fn records_lost(&self) -> u64 {
        self.records_lost
    }

    /// Bounds on what a process's figures may lack or wrongly include. `counting`: its counters, if they are still in
    /// the kernel. `ended`: its losses by counters that were already moved out of the kernel. `recovered`: the part of
    /// these losses that reconciliations recovered.
    pub fn losses(
        &self,
        process: &ProcessKey,
        counting: Option<&Counters>,
        ended: LostSamples,
        recovered: LostBlocks,
    ) -> Losses {
        let lost = counting.map(LostSamples::of).unwrap_or_default().with(ended);
        let mut losses = Losses {
            alloc: less(lost.alloc, recovered),
            inuse_missing: less(lost.unfollowed, LostBlocks::default()),
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
            LossLedger::default().losses(&PROCESS, Some(&counters), LostSamples::default(), LostBlocks::default());
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
        let before = ledger.losses(&PROCESS, Some(&lost), none, LostBlocks::default());
        assert_eq!(before.alloc, bound(11, 1007));
        assert_eq!((before.inuse_missing, before.inuse_stale), (bound(13, 1027), bound(4, 400)));
        assert!(before.peak_unknown);

        ledger.reconciled(14, Counts { processes: [(PROCESS, lost)].into(), ..Counts::default() });
        assert_eq!(ledger.records_lost(), 14);
        let later = Counters { frees_lost: 5, frees_lost_bytes: 450, ..lost };
        let after = ledger.losses(&PROCESS, Some(&later), none, LostBlocks { samples: 6, bytes: 600 });
        assert_eq!(after.alloc, bound(5, 407));
        assert_eq!((after.inuse_missing, after.inuse_stale), (bound(3, 27), bound(1, 50)));
        // Its counters were moved out of the kernel.
        let ended = ledger.losses(&PROCESS, None, LostSamples::of(&later), LostBlocks { samples: 6, bytes: 600 });
        assert_eq!((ended.alloc, ended.inuse_missing, ended.inuse_stale), (bound(5, 407), bound(3, 27), bound(0, 0)));
    }
}
