//! Rows: sums for one combination of stack, thread name, allocator function, process and sampling interval.

use heapbpf_statistics::sums::SampleSums;

use super::growth::Curve;
use crate::ages::Ages;
use crate::sample::SampleKey;

/// Sums of the samples with one key.
#[derive(Clone, Debug)]
pub struct HeapRow {
    /// Identity of the row.
    pub key: SampleKey,
    /// Time of its first sample (CLOCK_MONOTONIC).
    pub first_ns: u64,
    /// All samples.
    pub alloc: SampleSums,
    /// Samples whose frees are not tracked.
    pub untracked: u64,
    /// Ages of freed blocks, and of those in use when their process ended.
    pub ages: Ages,
    /// Whether a snapshot has taken its stack to be symbolized.
    pub named: bool,
    /// Whether its samples are mappings. Then all of them are.
    pub mapped: bool,
    /// Number of live sampled blocks.
    pub(super) live: u64,
    /// Blocks that were live when their process ended.
    pub(super) at_exit: SampleSums,
    /// Sums at the peak.
    pub(super) peak: SampleSums,
    /// Its growth since each mark, apart from its live blocks.
    pub(super) curve: Curve,
}

impl HeapRow {
    /// Creates a row without samples.
    pub(super) fn new(key: SampleKey, first_ns: u64, mapped: bool) -> Self {
        Self {
            key,
            first_ns,
            alloc: SampleSums::default(),
            untracked: 0,
            ages: Ages::default(),
            named: false,
            mapped,
            live: 0,
            at_exit: SampleSums::default(),
            peak: SampleSums::default(),
            curve: Curve::default(),
        }
    }

    /// Adds another row of the same process and interval.
    pub(super) fn add(&mut self, other: &Self) {
        self.first_ns = self.first_ns.min(other.first_ns);
        self.alloc.add(&other.alloc);
        self.untracked += other.untracked;
        self.ages.add(&other.ages);
        self.live += other.live;
        self.at_exit.add(&other.at_exit);
        self.peak.add(&other.peak);
        self.curve.add(&other.curve);
    }

    /// Sums of the blocks that were live when the process ended.
    pub const fn at_exit(&self) -> SampleSums {
        self.at_exit
    }

    /// Sums in use when the total in use peaked.
    pub const fn peak(&self) -> SampleSums {
        self.peak
    }
}
