//! The daemon's mapping of the filter in front of the live map. When the daemon removes an entry from the live map, it
//! must remove it from the filter, too.

use std::sync::atomic::Ordering;

use sampler_ebpf::filter::{SLOTS, slot_of};

use super::KernelError;
use super::loader::Loader;
use super::ring_memory::Mapping;

/// Distance between two counts: the kernel pads array elements to eight bytes (kernel/bpf/arraymap.c).
const STRIDE: u64 = 8;

/// The filter's counts, in memory shared with the BPF programs.
pub struct Filter(Mapping);

impl Filter {
    /// Maps the filter into memory.
    ///
    /// # Errors
    /// The object has no such map, or the kernel refuses the mapping.
    pub fn open(loader: &Loader) -> Result<Self, KernelError> {
        let (map, bytes) = (loader.map("FILTER")?, SLOTS as u64 * STRIDE);
        let counts = Mapping::of(map, 0, bytes, libc::PROT_READ | libc::PROT_WRITE);
        counts.map(Self).map_err(|source| KernelError::Read { what: "the live map's filter", source })
    }

    /// Removes a block from the filter. Call it for each block that the daemon removed from the live map.
    pub fn remove(&self, address: u64) {
        self.0.word_at(u64::from(slot_of(address)) * STRIDE).fetch_sub(1, Ordering::Relaxed);
    }
}
