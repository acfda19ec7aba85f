//! The live map: tracked blocks are added, looked up and removed.

use aya_ebpf::bindings::BPF_ANY;
use sampler_ebpf::abi::{FreeRecord, LiveKey, LiveValue};

use crate::ablation;
use crate::filter;
use crate::maps::{self, LIVE};
use crate::output;
use crate::thread::ThreadState;

/// `-ENOENT`.
const NOT_FOUND: i32 = -2;

/// Counts a free, and reports it if the block is tracked.
#[inline(always)]
pub fn release(state: &mut ThreadState, address: u64) {
    state.frees_seen += 1;
    if const { ablation::ends_after("free-count") } {
        return;
    }
    if filter::may_be_tracked(address) {
        release_tracked(state, address);
    }
}

/// The slow part of [`release`], in a function of its own so that the path of untracked blocks stays short.
///
/// The record is reserved before the block leaves the live map. Whoever finds the block gone can therefore rely on the
/// record being in the ring.
#[inline(never)]
fn release_tracked(state: &mut ThreadState, address: u64) {
    let key = LiveKey { space: state.space, address };
    // SAFETY: the value is copied at once. If another CPU replaces the entry meanwhile, the copy may mix both values,
    // but it consists of integers in any case.
    let Some(value) = (unsafe { LIVE.get(key) }).copied() else { return };
    let record = output::reserve::<FreeRecord>(maps::events());
    if remove(key) {
        output::complete_free(state, &value, record);
    } else if let Some(record) = record {
        // SAFETY: `record` was reserved above, and is not used afterwards.
        unsafe { output::discard(record) };
    }
}

/// Removes a block from the live map, if it is tracked, and returns its value.
#[inline(always)]
pub fn take_out(state: &ThreadState, address: u64) -> Option<LiveValue> {
    if !filter::may_be_tracked(address) {
        return None;
    }
    take_tracked(state, address)
}

/// Looks up a block in the live map without removing it.
#[inline(always)]
pub fn look(state: &ThreadState, address: u64) -> Option<LiveValue> {
    if !filter::may_be_tracked(address) {
        return None;
    }
    // SAFETY: the value is copied at once. If another CPU replaces the entry meanwhile, the copy may mix both values,
    // but it consists of integers in any case.
    Some(unsafe { *LIVE.get(LiveKey { space: state.space, address })? })
}

/// The slow part of [`take_out`].
#[inline(always)]
fn take_tracked(state: &ThreadState, address: u64) -> Option<LiveValue> {
    let key = LiveKey { space: state.space, address };
    // SAFETY: the value is copied at once. If another CPU replaces the entry meanwhile, the copy may mix both values,
    // but it consists of integers in any case.
    let value = unsafe { *LIVE.get(key)? };
    remove(key).then_some(value)
}

/// Removes an entry from the live map; `false` if it was already gone because two threads freed the same block.
#[inline(always)]
fn remove(key: LiveKey) -> bool {
    match LIVE.remove(key) {
        Ok(()) => filter::remove(key.address),
        Err(NOT_FOUND) => return false,
        // The kernel did not get the bucket's lock in time. The block is freed all the same; its entry is replaced when
        // the allocator returns the address again.
        Err(_) => {}
    }
    true
}

/// Adds a block to the live map; `false` if the map is full.
#[inline(always)]
pub fn put_in(state: &ThreadState, address: u64, value: &LiveValue) -> bool {
    // The filter comes before the map: no thread that can know the address may find the filter empty.
    filter::add(address);
    let key = LiveKey { space: state.space, address };
    let fits = LIVE.insert(key, *value, u64::from(BPF_ANY)).is_ok();
    if !fits {
        filter::remove(address);
    }
    fits
}

/// Puts back a block that a realloc took out before it failed.
#[inline(always)]
pub fn put_back(state: &mut ThreadState, address: u64, value: &LiveValue) {
    if !put_in(state, address, value) {
        // The map is full now. Without an entry, the free of the block would never be seen, so it counts as freed now.
        output::submit_free(state, value);
    }
}
