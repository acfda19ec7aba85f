//! Rows: what is known of one stack of one thread name of one process, under one interval.

use std::sync::Arc;

use sampler_ebpf::abi::ProcessKey;

use crate::heap::ages::Ages;
use crate::heap::sums::SampleSums;
use crate::unwind::raw::RawStack;

/// What rows are told apart by. Stacks are compared by address: equal ones are one (the unwinder sees to it).
#[derive(PartialEq, Eq, Hash)]
pub(super) struct RowKey {
    pub(super) process: ProcessKey,
    pub(super) interval: u64,
    pub(super) thread: Arc<str>,
    pub(super) stack: *const RawStack,
    pub(super) function: u16,
}

/// Sums of one stack of one thread name of one process, under one interval.
#[derive(Clone, Debug)]
pub struct HeapRow {
    /// Process.
    pub process: ProcessKey,
    /// Thread name.
    pub thread: Arc<str>,
    /// Allocator function.
    pub function: u16,
    /// Interval of these samples.
    pub interval: u64,
    /// Call stack.
    pub stack: Arc<RawStack>,
    /// CLOCK_MONOTONIC of its first sample.
    pub first_ns: u64,
    /// All samples.
    pub alloc: SampleSums,
    /// Samples that could not be followed.
    pub untracked: u64,
    /// Ages of freed blocks.
    pub ages: Ages,
    /// Whether a snapshot has carried its stack away to be named.
    pub named: bool,
    /// Sampled blocks that live.
    pub(super) live: u64,
    /// Blocks that were live when their process ended.
    pub(super) ended: SampleSums,
    /// Sums at the peak.
    pub(super) peak: SampleSums,
}

impl RowKey {
    pub(super) fn of(row: &HeapRow) -> Self {
        Self {
            process: row.process,
            interval: row.interval,
            thread: Arc::clone(&row.thread),
            stack: Arc::as_ptr(&row.stack),
            function: row.function,
        }
    }
}

impl HeapRow {
    /// Without samples.
    pub(super) fn new(
        process: ProcessKey,
        thread: Arc<str>,
        function: u16,
        interval: u64,
        stack: &Arc<RawStack>,
        first_ns: u64,
    ) -> Self {
        Self {
            process,
            thread,
            function,
            interval,
            stack: Arc::clone(stack),
            first_ns,
            alloc: SampleSums::default(),
            untracked: 0,
            ages: Ages::default(),
            named: false,
            live: 0,
            ended: SampleSums::default(),
            peak: SampleSums::default(),
        }
    }

    /// Adds all of another row of the same process and interval.
    pub(super) fn take_in(&mut self, other: &Self) {
        self.first_ns = self.first_ns.min(other.first_ns);
        self.alloc.add(&other.alloc);
        self.untracked += other.untracked;
        self.ages.add(&other.ages);
        self.live += other.live;
        self.ended.add(&other.ended);
        self.peak.add(&other.peak);
    }

    /// Sums in use when the process ended.
    pub const fn ended(&self) -> SampleSums {
        self.ended
    }

    /// Sums in use at the peak of the total.
    pub const fn peak(&self) -> SampleSums {
        self.peak
    }
}

// SAFETY: `stack` is only compared and hashed; the row beside it keeps what it points to alive.
unsafe impl Send for RowKey {}
