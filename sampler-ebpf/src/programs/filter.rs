//! Counts tracked blocks by a hash of their address. With one read of a small array, this recognises most frees of
//! untracked blocks, and saves a lookup in a map that is too large for the caches.

use core::intrinsics::AtomicOrdering;

use sampler_ebpf::filter::slot_of;

use crate::maps::FILTER;

/// Whether a block at this address may be in the live map. `false` is definite.
#[inline(always)]
pub fn may_be_tracked(address: u64) -> bool {
    FILTER.get(slot_of(address)).is_none_or(|count| *count != 0)
}

/// Counts a block that is about to enter the live map.
#[inline(always)]
pub fn add(address: u64) {
    change(address, 1);
}

/// Uncounts a block that has left the live map.
#[inline(always)]
pub fn remove(address: u64) {
    change(address, u32::MAX);
}

#[inline(always)]
fn change(address: u64, by: u32) {
    if let Some(count) = FILTER.get_ptr_mut(slot_of(address)) {
        // SAFETY: the pointer is to an element of the map, an aligned u32; every writer changes it atomically.
        unsafe { core::intrinsics::atomic_xadd::<u32, u32, { AtomicOrdering::Relaxed }>(count, by) };
    }
}
