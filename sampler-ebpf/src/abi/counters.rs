//! What is counted of every thread, and the record in which it comes.

use super::ProcessKey;

/// Counters of a thread (kernel side), of a process, and of the whole recording.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Outermost allocation calls that were not sampled.
    pub unsampled: u64,
    /// Bytes they asked for.
    pub unsampled_bytes: u64,
    /// Calls of hooked functions that free, of a block that is not NULL, by whomever: an allocator's own (tcmalloc's realloc
    /// frees the old block) as well as the program's.
    pub frees_seen: u64,
    /// Frees of tracked samples.
    pub frees_matched: u64,
    /// Calls an allocator made into itself.
    pub inner: u64,
    /// Outermost allocation calls that were sampled.
    pub sampled: u64,
    /// Bytes that sampled calls asked for, counted at their end: those that failed are not in it.
    pub sampled_bytes: u64,
    /// Unsampled calls that were seen to fail all the same (a realloc of a tracked block).
    pub unsampled_failed: u64,
    /// Sampled, and reported.
    pub submitted: u64,
    /// Sampled, but the call returned NULL; or refused without a trial, for a size no allocator can give.
    pub failed: u64,
    /// Sampled, lost: the events ring was full.
    pub lost_ring_full: u64,
    /// Sampled, lost: the call never returned (longjmp, an exception, the thread's end).
    pub lost_abandoned: u64,
    /// Sampled, and neither reported nor lost yet: the call was in flight when the counters were read. The daemon works
    /// it out; the programs leave it at 0.
    pub lost_in_flight: u64,
    /// Hit, lost: the kernel had no state for the thread.
    pub lost_no_thread_state: u64,
    /// Sampled, lost: the result could not be read (posix_memalign's pointer).
    pub lost_result_unreadable: u64,
    /// Reported samples that could not be followed to their free: the live map was full.
    pub untracked: u64,
    /// Bytes of these.
    pub untracked_bytes: u64,
    /// Bytes of the samples lost because the events ring was full.
    pub lost_ring_full_bytes: u64,
    /// Bytes that the other lost samples asked for: the call never returned, or its result could not be read.
    pub lost_call_bytes: u64,
    /// Frees of tracked samples that were not reported: the events ring was full. Reconciliation finds them.
    pub frees_lost: u64,
    /// Bytes of the blocks that these freed.
    pub frees_lost_bytes: u64,
    /// Reported samples whose stack did not fit into the stacks ring, or could not be taken.
    pub stacks_lost: u64,
    /// Process events (fork, exec, exit) that did not fit into the events ring.
    pub process_events_lost: u64,
    /// Reported samples whose address was still tracked: a free was missed.
    pub stale_replaced: u64,
    /// Threads that these counters were added up over (ended ones, in a process's totals).
    pub threads: u64,
}

impl Counters {
    /// Outermost allocation calls: the left side of the accounting identity.
    #[must_use]
    pub const fn hits(&self) -> u64 {
        self.unsampled + self.sampled + self.lost_no_thread_state
    }

    /// Sampled calls whose end was counted.
    #[must_use]
    pub const fn sampled_ended(&self) -> u64 {
        self.submitted
            + self.failed
            + self.lost_ring_full
            + self.lost_abandoned
            + self.lost_in_flight
            + self.lost_result_unreadable
    }

    /// Adds another set of counters.
    pub fn add(&mut self, other: &Self) {
        for (sum, value) in self.as_mut_array().iter_mut().zip(other.as_array()) {
            *sum = sum.wrapping_add(*value);
        }
    }

    /// All counters in declaration order.
    #[must_use]
    pub const fn as_array(&self) -> &[u64; COUNTERS] {
        // SAFETY: `repr(C)` with `COUNTERS` fields of type u64 (checked at compile time below) is laid out as the array.
        unsafe { &*core::ptr::from_ref(self).cast() }
    }

    /// All counters in declaration order, to be changed.
    pub const fn as_mut_array(&mut self) -> &mut [u64; COUNTERS] {
        // SAFETY: as in `as_array`.
        unsafe { &mut *core::ptr::from_mut(self).cast() }
    }
}

/// Number of counters in [`Counters`].
pub const COUNTERS: usize = size_of::<Counters>() / size_of::<u64>();

/// What the thread iterator writes for each thread with state.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadRecord {
    /// Process of the thread.
    pub process: ProcessKey,
    /// Thread id.
    pub tid: u32,
    /// Zero.
    pub reserved: u32,
    /// The thread's counters, as they were at some moment of the reading.
    pub counters: Counters,
    /// Samples that reallocs in flight took out of the live map: they live until these return. 0: none.
    pub reallocated: [u64; super::AWAITED_CALLS],
}
