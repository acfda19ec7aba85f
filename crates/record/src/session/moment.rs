//! Cuts as data: a moment of the recording, and what was read for it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use heapbpf_heap::live::LostBlocks;
use heapbpf_kernel::totals::Counts;
use heapbpf_profile::model::Unread;
use heapbpf_unwind::raw::RawStack;
use sampler_ebpf::abi::{Counters, LiveKey, LiveValue, ProcessKey};

use crate::intake::lives::Census;
use crate::intake::losses::LossLedger;

/// Sampled blocks, by process.
pub(super) type Blocks = HashMap<ProcessKey, LostBlocks>;

/// A moment of the recording, and the figures at that moment.
#[derive(Clone)]
pub(super) struct Cut {
    /// CLOCK_MONOTONIC. Everything up to this time has been taken in, and nothing after it.
    pub(super) time_ns: u64,
    /// Whether the counters could be read. If not, `counts` is empty and `total` is from earlier.
    pub(super) has_counters: bool,
    /// Counters at that moment. Each thread's were read within [`Counts::read_ns`], which starts at that moment.
    pub(super) counts: Counts,
    /// Sum of these counters and of those that have left the kernel.
    pub(super) total: Counters,
    /// Sampled allocations after the moment that the counters may include.
    pub(super) slack: Blocks,
    /// Sampled blocks that may have been in use at the moment and that no record reports.
    pub(super) unseen: Blocks,
    /// Records sent by the chosen moment that could not be read in time. If there are any, `time_ns` is an earlier
    /// moment.
    pub(super) unread: Option<Unread>,
}

/// A cut whose moment has been chosen, but may not have been reached.
pub(super) struct BegunCut {
    /// Records lost before the moment, over all processes.
    pub(super) records_lost: u64,
    /// Counters at the moment, and their sum.
    pub(super) counts: Counts,
    pub(super) total: Counters,
    /// The live map after the moment, if records were lost.
    pub(super) reading: Option<Reading>,
    /// The processes that lived right before the moment, if an end may not have been reported.
    pub(super) census: Option<Census>,
    /// Position up to which the events ring has to be read.
    pub(super) reserved: u64,
}

/// The kernel's live map as read after a cut's moment.
pub(super) struct Reading {
    /// Blocks from before the cut that were unknown when the scan found them.
    pub(super) unknown: Vec<(LiveKey, LiveValue)>,
    /// Counters before the cut, and after the map was read.
    pub(super) before: Counts,
    pub(super) after: Counts,
    /// Samples found by a second scan of the map, if one was needed.
    pub(super) put_back: HashSet<u64>,
    /// Address ranges that are mapped, by address space, where unmappings were lost.
    pub(super) mapped: HashMap<ProcessKey, Vec<(u64, u64)>>,
}

/// State kept from cut to cut.
#[derive(Default)]
pub(super) struct Cuts {
    /// How lost records may have changed figures.
    pub(super) ledger: LossLedger,
    /// The cut that nothing blocks on.
    pub(super) waiting: Option<BegunCut>,
    /// Sum of the counters as last read.
    pub(super) last_total: Counters,
    /// A census that belongs to no cut, until the records up to it have been taken in.
    pub(super) census: Option<Census>,
    /// Placeholder for the stacks of samples whose records were lost.
    pub(super) lost_stack: Option<Arc<RawStack>>,
}

impl Reading {
    /// Blocks and mappings, by process, whose free records were lost between the cut and the reading. Which ones they
    /// were is unknown.
    pub(super) fn frees_lost(&self) -> Blocks {
        let mut lost = Blocks::new();
        for (process, now) in &self.after.processes {
            let then = self.before.processes.get(process).copied().unwrap_or_default();
            let counts = |it: &Counters| [(it.unmaps_lost, it.unmaps_lost_bytes), (it.frees_lost, it.frees_lost_bytes)];
            for (now, then) in counts(now).into_iter().zip(counts(&then)).filter(|(now, then)| now.0 > then.0) {
                let blocks = LostBlocks { samples: now.0 - then.0, bytes: now.1.saturating_sub(then.1) };
                lost.entry(*process).or_default().add(blocks);
            }
        }
        lost
    }
}

/// How many of the records that `total` counts could not be read in time.
pub(super) fn unread(total: &Counters, taken_in: u64) -> Unread {
    // A free may be counted as lost before it is counted as matched: a running thread's counters are not from a single
    // moment.
    let of = (total.submitted + total.frees_matched).saturating_sub(total.frees_lost);
    Unread { records: of.saturating_sub(taken_in), of }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(tgid: u32) -> ProcessKey {
        ProcessKey { start_ns: 1, tgid, exec_id: 0 }
    }

    fn counts(counters: &[(u32, u64, u64)]) -> Counts {
        let processes = counters.iter().map(|(tgid, frees_lost, frees_lost_bytes)| {
            let counters =
                Counters { frees_lost: *frees_lost, frees_lost_bytes: *frees_lost_bytes, ..Counters::default() };
            (key(*tgid), counters)
        });
        Counts { processes: processes.collect(), ..Counts::default() }
    }

    #[test]
    fn frees_lost_during_the_reading_are_those_counted_since() {
        let reading = Reading {
            unknown: Vec::new(),
            before: counts(&[(1, 3, 300), (2, 5, 50)]),
            after: counts(&[(1, 7, 340), (2, 5, 50), (3, 2, 9)]),
            put_back: HashSet::new(),
            mapped: HashMap::new(),
        };
        let lost = reading.frees_lost();
        assert_eq!(lost.len(), 2);
        assert_eq!((lost[&key(1)].samples, lost[&key(1)].bytes), (4, 40));
        assert_eq!((lost[&key(3)].samples, lost[&key(3)].bytes), (2, 9));
    }

    #[test]
    fn unread_records_are_those_sent_and_not_taken_in() {
        let total = Counters { submitted: 10, frees_matched: 6, frees_lost: 1, ..Counters::default() };
        let unread_of = |taken_in| {
            let Unread { records, of } = unread(&total, taken_in);
            (records, of)
        };
        assert_eq!(unread_of(12), (3, 15));
        assert_eq!(unread_of(16), (0, 15), "some may have been sent since");
        let torn = Counters { frees_lost: 1, ..Counters::default() };
        assert_eq!(unread(&torn, 0).of, 0, "the loss was counted, and the free not yet");
    }
}
