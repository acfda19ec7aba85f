//! Counts made by the daemon, and exact allocation figures derived from the kernel side's counters.

use heapbpf_kernel::lifecycle::Skipped;
use sampler_ebpf::abi::Counters;

/// Counters that the daemon maintains itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DaemonCounters {
    /// Records of sampled allocations that were taken in.
    pub allocations_taken_in: u64,
    /// Lost frees that were detected, by reconciliation with the kernel's live map or at the end of a process.
    pub frees_reconciled: u64,
    /// Lost allocations that were recovered from the kernel's live map.
    pub allocations_reconciled: u64,
    /// Mappings, or parts of them, that were found unmapped after the record of the unmapping was lost.
    pub mappings_reconciled: u64,
    /// Sampled mappings that allocators made for themselves, by their stacks. They do not count.
    pub mappings_of_allocators: u64,
    /// Sampled mappings made by code of files that were not examined yet. They do not count.
    pub mappings_early: u64,
    /// Sampled mappings of which the stack does not tell who made them. They count as lost.
    pub mappings_undecided: u64,
    /// Records that could not be decoded.
    pub records_unknown: u64,
    /// Samples whose stack copy did not arrive.
    pub stacks_missing: u64,
    /// Stacks that are incomplete because the stacks ring had no space for a longer copy.
    pub stacks_shortened: u64,
    /// Stacks that were unwound.
    pub stacks_unwound: u64,
    /// Of these, repeated stacks, which only cost a comparison.
    pub stacks_repeated: u64,
    /// Of these, stacks that reach the thread's entry.
    pub stacks_complete: u64,
    /// Rows merged into others because there were too many.
    pub stacks_merged: u64,
    /// Process events (forks, maps, …) that the kernel dropped before we read them.
    pub host_events_lost: u64,
    /// Errors of the running recording, after each of which it tried again.
    pub errors: u64,
    /// Ends of processes and of programs (by exec) that no record reported, found in the kernel's list of processes.
    pub ends_found: u64,
    /// Sampled blocks of these that were removed from the live map.
    pub blocks_of_ended: u64,
    /// Processes with inline hooks some of whose calls were not counted: at their end, or while they switched over from
    /// probes.
    pub inline_incomplete: u64,
    /// Files, and other objects, that are or were mapped executable.
    pub modules: u64,
    /// How many of them are open.
    pub modules_open: u64,
    /// Forks, execs and thread exits that the BPF programs may not have seen, because the kernel skipped their runs.
    pub lifecycle: Skipped,
    /// Upper bound of the host's system calls that the programs of `--mmap` did not see for the same reason.
    pub mapping_calls_skipped: u64,
    /// Total time that threads of the targets waited for samples to be taken in, nanoseconds.
    pub waited_ns: u64,
}

/// Exact number of allocated bytes. Calls that were seen to fail are not included.
pub const fn exact_bytes(counters: &Counters) -> u64 {
    counters.unsampled_bytes.wrapping_add(counters.sampled_bytes)
}

/// Exact number of allocations. Announced ones are not included: they are samples of an unknown number. A sampled call
/// in flight is not included, as its bytes are not counted yet either.
pub const fn exact_objects(counters: &Counters) -> u64 {
    let failed = counters.failed.saturating_add(counters.unsampled_failed);
    let none = failed.saturating_add(counters.lost_in_flight).saturating_add(counters.announced);
    counters.unsampled.saturating_add(counters.sampled).saturating_sub(none)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Counters of 100 hits, each accounted for once.
    pub fn counters() -> Counters {
        Counters {
            calls: 103,
            reentrant: 2,
            zero_reallocs: 1,
            unsampled: 90,
            unsampled_bytes: 9000,
            sampled: 10,
            sampled_bytes: 900,
            submitted: 6,
            failed: 1,
            lost_ring_full: 2,
            lost_abandoned: 1,
            ..Counters::default()
        }
    }

    #[test]
    fn failed_calls_are_no_allocations() {
        assert_eq!(exact_objects(&counters()), 99);
        let one_in_flight = Counters { calls: 104, sampled: 11, lost_in_flight: 1, ..counters() };
        assert_eq!((exact_objects(&one_in_flight), exact_bytes(&one_in_flight)), (99, 9900));
        assert_eq!(exact_bytes(&counters()), 9900);
    }
}
