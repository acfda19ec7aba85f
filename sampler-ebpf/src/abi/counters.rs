//! The counters of each thread, and the record that passes them to the daemon.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::ProcessKey;

/// Counters of a thread (kernel side), of a process, and of the whole recording.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Counters {
    /// Calls of allocation functions, counted at their entry, before any decision about them. Includes reentrant calls.
    pub calls: u64,
    /// Outermost allocation calls that were not sampled.
    pub unsampled: u64,
    /// Bytes that these calls requested.
    pub unsampled_bytes: u64,
    /// Calls of hooked functions that free a block other than NULL. This includes frees by an allocator itself
    /// (tcmalloc's realloc frees the old block), not only those by the program.
    pub frees_seen: u64,
    /// Frees of tracked samples, including those by realloc, which [`Counters::frees_seen`] does not count.
    pub frees_matched: u64,
    /// Reentrant calls: those that an allocator made into itself. Not hits.
    pub reentrant: u64,
    /// Calls of realloc with a size of 0 that freed their block. Not hits.
    pub zero_reallocs: u64,
    /// Outermost allocation calls that were sampled.
    pub sampled: u64,
    /// Bytes that sampled calls requested, counted when they end. Failed calls are not included.
    pub sampled_bytes: u64,
    /// Unsampled calls that were probed for another reason (a realloc of a tracked block) and failed.
    pub unsampled_failed: u64,
    /// Sampled calls that were reported.
    pub submitted: u64,
    /// Sampled calls that returned NULL, and calls rejected without a trial because no allocator can return that many
    /// bytes.
    pub failed: u64,
    /// Sampled calls lost because the events ring was full.
    pub lost_ring_full: u64,
    /// Sampled calls lost because they never returned (longjmp, an exception, the thread's exit).
    pub lost_abandoned: u64,
    /// Sampled calls that are neither reported nor lost yet, because they were in flight when the counters were read.
    /// Computed by the daemon; the programs leave it at 0.
    pub lost_in_flight: u64,
    /// Calls that had been entered, but not decided, when the counters were read. Also computed by the daemon.
    pub lost_undecided: u64,
    /// Allocation calls lost because the kernel had no state for the thread.
    pub lost_no_thread_state: u64,
    /// Sampled calls lost because the result could not be read (posix_memalign's pointer).
    pub lost_result_unreadable: u64,
    /// Reported samples that could not be tracked until their free, because the live map, or the set in their process,
    /// was full.
    pub untracked: u64,
    /// Bytes of these samples.
    pub untracked_bytes: u64,
    /// Bytes of the samples lost because the events ring was full.
    pub lost_ring_full_bytes: u64,
    /// Bytes requested by the other lost samples: the call never returned, or its result could not be read.
    pub lost_call_bytes: u64,
    /// Frees of tracked samples that were not reported because the events ring was full. Reconciliation with the live
    /// map finds them.
    pub frees_lost: u64,
    /// Bytes of the blocks that these frees released.
    pub frees_lost_bytes: u64,
    /// Sampled mappings (`--mmap`) among those lost because the events ring was full. The live map has no mappings, so
    /// these stay lost.
    pub mappings_lost: u64,
    /// Bytes of these mappings.
    pub mappings_lost_bytes: u64,
    /// Unmappings of address ranges (`--mmap`) that were not reported. Reconciliation with the process's mappings finds
    /// most of them.
    pub unmaps_lost: u64,
    /// Bytes of these ranges, sampled or not; 0 for an unknown range.
    pub unmaps_lost_bytes: u64,
    /// Reported samples whose stack did not fit into the stacks ring, or could not be captured.
    pub stacks_lost: u64,
    /// Process events (fork, exec, exit) that did not fit into the events ring.
    pub process_events_lost: u64,
    /// Reported samples whose address was still tracked, which means that a free was missed.
    pub stale_replaced: u64,
    /// Frees by threads for which the kernel had no state. Their tracked blocks are reported anyway.
    pub frees_no_thread_state: u64,
    /// Mapping system calls (`--mmap`) whose entry or exit was not seen: the kernel had no state for the thread, or the
    /// recording began in between.
    pub system_calls_lost: u64,
    /// Blocks that were freed and reported while the kernel refused to remove them from the live map. Their entries are
    /// marked as freed.
    pub removals_refused: u64,
    /// Number of threads in these counters (in a process's totals: its exited threads).
    pub threads: u64,
    /// Sampled calls that inline hooks reported, including those lost for lack of state. They are part of
    /// [`Counters::calls`] and [`Counters::sampled`], and also of the counts that the target keeps itself; the daemon
    /// counts them once.
    pub inline_sampled: u64,
    /// Calls that the target counted itself (inline hooks) and that reached no probe. They are part of
    /// [`Counters::calls`]. Computed by the daemon; the programs leave it at 0.
    pub counted_inside: u64,
    /// Frees of sampled blocks by targets that count themselves: the only frees in them that reach a probe. They are
    /// part of [`Counters::frees_seen`]. Also computed by the daemon.
    pub inline_frees: u64,
    /// Samples that the process announced itself. They are part of [`Counters::calls`] and [`Counters::sampled`]. Its
    /// other allocations are not counted.
    pub announced: u64,
    /// Bytes that the calls in [`Counters::inline_sampled`] requested.
    pub inline_sampled_bytes: u64,
    /// The part of [`Counters::untracked`] that did not fit into the set of sampled blocks in their process.
    pub set_full: u64,
}

impl Counters {
    /// Outermost allocation calls: the left side of the accounting identity. They are counted at their entry, except
    /// those of threads without state.
    #[must_use]
    pub const fn hits(&self) -> u64 {
        self.calls.saturating_sub(self.reentrant + self.zero_reallocs) + self.lost_no_thread_state
    }

    /// Calls that were decided, one way or the other.
    #[must_use]
    pub const fn decided(&self) -> u64 {
        self.unsampled + self.sampled + self.reentrant + self.zero_reallocs
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
        zerocopy::transmute_ref!(self)
    }

    /// All counters in declaration order, mutable.
    pub fn as_mut_array(&mut self) -> &mut [u64; COUNTERS] {
        zerocopy::transmute_mut!(self)
    }
}

/// Number of counters in [`Counters`].
pub const COUNTERS: usize = size_of::<Counters>() / size_of::<u64>();

/// Bit of [`ThreadRecord::in_flight`]: a call that may end in a jump to another hooked function is in flight.
pub const IN_FLIGHT_TAIL: u32 = 1 << super::MAX_IN_FLIGHT_CALLS;

/// The record that the thread iterator writes for each thread with state.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ThreadRecord {
    /// Process of the thread.
    pub process: ProcessKey,
    /// Thread id.
    pub tid: u32,
    /// Its calls in flight: bit i for the call in slot i; [`IN_FLIGHT_TAIL`] if its last call may have ended in a jump
    /// to another hooked function.
    pub in_flight: u32,
    /// The thread's counters, each as it was at some moment during the read.
    pub counters: Counters,
    /// Samples that reallocs in flight took out of the live map. They stay live until the reallocs return. 0 means
    /// none.
    pub reallocated: [u64; super::MAX_IN_FLIGHT_CALLS],
}
