//! A sampled allocation.

use heapbpf_profile::model::{ByAddress, RowKey};
use heapbpf_unwind::raw::RawStack;
use sampler_ebpf::abi::ProcessKey;

/// Which row of the heap a sample belongs to: the process that allocated, the allocator function by its number in the table
/// of allocators, and the call stack. Stacks are compared by address: the unwinder keeps equal ones once.
pub type SampleKey = RowKey<ProcessKey, u16, ByAddress<RawStack>>;

/// A sampled allocation, decoded and with its stack.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Unique in the recording.
    pub id: u64,
    /// Identity of the row that it is added to.
    pub key: SampleKey,
    /// Process whose address space the block is in.
    pub space: ProcessKey,
    /// CLOCK_MONOTONIC.
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
    /// Whether it is a mapping, which is unmapped by address and possibly in parts.
    pub mapped: bool,
}
