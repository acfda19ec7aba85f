//! The live map: adds, looks up and removes tracked blocks.

use aya_ebpf::bindings::BPF_ANY;
use sampler_ebpf::abi::{FreeRecord, LiveKey, LiveValue, fault};

use crate::config::config;
use crate::counters::{self, add_shared, count_removal_refused, exchange_if_equal};
use crate::filter;
use crate::maps::LIVE;
use crate::output;
use crate::process::{current_pid_tgid, current_task, process_of, space_of};
use crate::thread::ThreadState;

/// `-ENOENT`.
const NOT_FOUND: i32 = -2;
/// `-EBUSY`.
const BUSY: i32 = -16;

/// Counts a free, and reports it if the block is tracked.
#[inline(always)]
pub fn release(state: &mut ThreadState, address: u64) {
    state.frees_seen += 1;
    if filter::may_be_tracked(address) {
        release_tracked(state, address);
    }
}

/// The slow part of [`release`], in a separate function so that the path of untracked blocks stays short.
#[inline(never)]
fn release_tracked(state: &mut ThreadState, address: u64) {
    let key = LiveKey { space: state.space, address };
    if let Some((value, record)) = take_with_record(key) {
        output::complete_free(state, &value, record);
    }
}

/// Counts a free by a thread without state, and reports it if the block is tracked.
#[inline(always)]
pub fn release_without_state(address: u64) {
    if let Some(counters) = counters::without_state(process_of(current_task())) {
        // SAFETY: the pointer is to a counter in a map's value.
        unsafe {
            add_shared(&raw mut (*counters).frees_seen, 1);
            add_shared(&raw mut (*counters).frees_no_thread_state, 1);
        }
    }
    report_without_state(address);
}

/// Reports the free of a block by a thread without state, if the block is tracked.
#[inline(never)]
pub fn report_without_state(address: u64) {
    if !filter::may_be_tracked(address) {
        return;
    }
    let task = current_task();
    let process = process_of(task);
    let space = space_of(task, process);
    if let Some((value, record)) = take_with_record(LiveKey { space, address }) {
        output::complete_free_without_state(process, current_pid_tgid() as u32, space, &value, record);
    }
}

/// Removes a block from the live map, if it is tracked. Returns its value, and the reserved record of its free if there
/// was space.
///
/// The record is reserved before the block leaves the live map. So if the block is missing from the map, the record is
/// certain to be in the ring.
#[inline(always)]
fn take_with_record(key: LiveKey) -> Option<(LiveValue, Option<&'static mut FreeRecord>)> {
    let value = tracked(key)?;
    let record = output::reserve::<FreeRecord>();
    if remove(key, value.sample) {
        return Some((value, record));
    }
    if let Some(record) = record {
        // SAFETY: `record` was reserved above, and is not used afterwards.
        unsafe { output::discard(record) };
    }
    None
}

/// Removes a block from the live map, if it is tracked, and writes its value to `to`. Returns whether it was there.
/// (The value goes through a pointer, because return values are copied, and programs have 512 bytes of stack.)
#[inline(always)]
pub fn take_out(state: &ThreadState, address: u64, to: &mut LiveValue) -> bool {
    filter::may_be_tracked(address) && find_block(state, address, 1, to) != 0
}

/// Looks up a block in the live map without removing it.
#[inline(always)]
pub fn look(state: &ThreadState, address: u64, to: &mut LiveValue) -> bool {
    filter::may_be_tracked(address) && find_block(state, address, 0, to) != 0
}

/// Looks up a block, and also removes it if `takes` is 1. Returns 1 if it was there, otherwise 0. (A global function:
/// the verifier checks it once.)
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn find_block(state: *const ThreadState, address: u64, takes: u32, to: *mut LiveValue) -> u32 {
    // SAFETY: the callers pass references.
    let (Some(state), Some(to)) = (unsafe { state.as_ref() }, unsafe { to.as_mut() }) else { return 0 };
    let key = LiveKey { space: state.space, address };
    let Some(value) = tracked(key) else { return 0 };
    *to = value;
    u32::from(takes == 0 || remove(key, to.sample))
}

/// Returns the value of a tracked block.
#[inline(always)]
fn tracked(key: LiveKey) -> Option<LiveValue> {
    // SAFETY: the value is copied at once. If another CPU replaces the entry at the same time, the copy may mix both
    // values, but it consists of integers in any case.
    let value = unsafe { *LIVE.get(key)? };
    (value.sample != LiveValue::FREED).then_some(value)
}

/// Removes a sample's entry from the live map; `false` if it was already gone because two threads freed the same block.
#[inline(always)]
fn remove(key: LiveKey, sample: u64) -> bool {
    let removed = if config!(faults) & fault::REMOVAL_REFUSED == 0 { LIVE.remove(key) } else { Err(BUSY) };
    match removed {
        Ok(()) => {
            filter::remove(key.address);
            true
        }
        Err(NOT_FOUND) => false,
        // The kernel did not get the bucket's lock in time. The block is freed anyway.
        Err(_) => mark_freed(key, sample),
    }
}

/// Marks the entry of a freed block that stays in the live map, so that its free is reported once. The next block at
/// the address, or the end of the process, replaces the entry. The filter may then count one block too many, which
/// costs a lookup.
#[inline(always)]
fn mark_freed(key: LiveKey, sample: u64) -> bool {
    let Some(entry) = LIVE.get_ptr_mut(key) else { return false };
    // SAFETY: the pointer is to the entry's value, whose first field is an aligned `u64`.
    let marked = unsafe { exchange_if_equal(&raw mut (*entry).sample, sample, LiveValue::FREED) };
    if marked {
        count_removal_refused();
    }
    marked
}

/// Adds a block to the live map; `false` if the map is full.
#[inline(always)]
pub fn put_in(state: &ThreadState, address: u64, value: &LiveValue) -> bool {
    // The filter is updated before the map: a thread that can know the address must never find the filter empty.
    filter::add(address);
    let key = LiveKey { space: state.space, address };
    let fits = LIVE.insert(key, value, u64::from(BPF_ANY)).is_ok();
    if !fits {
        filter::remove(address);
    }
    fits
}

/// Puts back a block that a realloc took out before it failed.
#[inline(always)]
pub fn put_back(state: &mut ThreadState, address: u64, value: &LiveValue) {
    if !put_in(state, address, value) {
        // The map is full now. Without an entry, the free of the block would never be seen, so the block counts as
        // freed now.
        output::submit_free(state, value);
    }
}
