//! A sampled allocation.

use heapbpf_profile::model::{ByAddress, RowKey};
use heapbpf_unwind::raw::RawStack;
use sampler_ebpf::abi::ProcessKey;

/// Key of the row that a sample belongs to: the process that allocated, the index of the allocator function in the
/// table of allocators, and the call stack. Stacks are compared by address, because the unwinder stores equal ones
/// once.
pub type SampleKey = RowKey<ProcessKey, u16, ByAddress<RawStack>>;

/// A sampled allocation, decoded and with its stack.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Unique within the recording.
    pub id: u64,
    /// Key of the row that it is added to.
    pub key: SampleKey,
    /// Process whose address space the block is in.
    pub space: ProcessKey,
    /// Time of the allocation (CLOCK_MONOTONIC).
    pub time_ns: u64,
    /// Address of the block.
    pub address: u64,
    /// Bytes requested.
    pub size_bytes: u64,
    /// Trials of the allocation.
    pub trials: u64,
    /// Failed trials before the successful one.
    pub offset: u64,
    /// Whether its free will be seen.
    pub tracked: bool,
    /// Whether it is a mapping. Mappings are unmapped by address, possibly in parts.
    pub mapped: bool,
}
