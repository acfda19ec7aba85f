//! free and its kin: one look-up of the address; only a tracked block costs more.

use core::ffi::c_void;

use aya_ebpf::bindings::BPF_ANY;
use sampler_ebpf::abi::{FreeRecord, LiveKey, LiveValue};

use crate::allocation;
use crate::arch::Arguments;
use crate::filter;
use crate::maps::{self, LIVE};
use crate::output;
use crate::stage;
use crate::state::ThreadState;

/// `-ENOENT`.
const NOT_FOUND: i32 = -2;

/// At the entry of free, before the block can be reused.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe/free")]
pub extern "C" fn free_entry(ctx: *mut c_void) -> u32 {
    let address = Arguments::of(ctx).get(allocation::cookie(ctx).old_argument());
    if address == 0 || const { stage::is_last("free-cookie") } {
        return 0;
    }
    let Some(state) = ThreadState::of_target() else { return 0 };
    if const { stage::is_last("free-state") } {
        return 0;
    }
    release(state, address);
    0
}

/// Counts a free, and reports it if the block is tracked.
#[inline(always)]
pub fn release(state: &mut ThreadState, address: u64) {
    state.frees_seen += 1;
    if const { stage::is_last("free-count") } {
        return;
    }
    if filter::may_be_tracked(address) {
        release_tracked(state, address);
    }
}

/// The rest of [`release`], apart so that the path of untracked blocks stays short.
///
/// The record is reserved before the block leaves the live map: whoever finds the block gone can rely on the record
/// being in the ring by then.
#[inline(never)]
fn release_tracked(state: &mut ThreadState, address: u64) {
    let key = LiveKey { space: state.space, address };
    // SAFETY: copied at once.
    let Some(value) = (unsafe { LIVE.get(key) }).copied() else { return };
    let record = output::reserve::<FreeRecord>(maps::events());
    if remove(key) {
        output::complete_free(state, &value, record);
    } else if let Some(record) = record {
        output::discard(record);
    }
}

/// Takes a block out of the live map, if it is tracked.
#[inline(always)]
pub fn take_out(state: &ThreadState, address: u64) -> Option<LiveValue> {
    if !filter::may_be_tracked(address) {
        return None;
    }
    take_tracked(state, address)
}

/// Looks a block up in the live map and leaves it there.
#[inline(always)]
pub fn look(state: &ThreadState, address: u64) -> Option<LiveValue> {
    if !filter::may_be_tracked(address) {
        return None;
    }
    // SAFETY: copied at once.
    Some(unsafe { *LIVE.get(LiveKey { space: state.space, address })? })
}

/// The rest of [`take_out`].
#[inline(always)]
fn take_tracked(state: &ThreadState, address: u64) -> Option<LiveValue> {
    let key = LiveKey { space: state.space, address };
    // SAFETY: copied at once.
    let value = unsafe { *LIVE.get(key)? };
    remove(key).then_some(value)
}

/// Removes an entry of the live map; `false` if it was gone already: two threads free the same block.
#[inline(always)]
fn remove(key: LiveKey) -> bool {
    match LIVE.remove(key) {
        Ok(()) => filter::remove(key.address),
        Err(NOT_FOUND) => return false,
        // The kernel did not get the bucket's lock in time. The block is freed all the same; its entry goes when the
        // address is given again.
        Err(_) => {}
    }
    true
}

/// Puts a block into the live map; `false` if the map is full.
#[inline(always)]
pub fn put_in(state: &ThreadState, address: u64, value: &LiveValue) -> bool {
    // Before the map: nobody who can know the address may find the filter empty.
    filter::add(address);
    let key = LiveKey { space: state.space, address };
    let fits = LIVE.insert(key, *value, u64::from(BPF_ANY)).is_ok();
    if !fits {
        filter::remove(address);
    }
    fits
}

/// Puts a block back that a realloc took out before it failed.
#[inline(always)]
pub fn put_back(state: &mut ThreadState, address: u64, value: &LiveValue) {
    if !put_in(state, address, value) {
        // No room any more: without an entry its free would never be seen, so it counts as freed now.
        output::submit_free(state, value);
    }
}
