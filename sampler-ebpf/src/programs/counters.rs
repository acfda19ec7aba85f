//! Counters that several CPUs add to.

use core::intrinsics::AtomicOrdering;

use aya_ebpf::bindings::BPF_NOEXIST;
use sampler_ebpf::abi::{Counters, ProcessKey};

use crate::maps::{self, TOTALS, UNATTRIBUTED};
use crate::process::{current_task, process_of};

/// Adds to a counter that several CPUs may add to.
///
/// # Safety
/// `counter` must point to an aligned `u64` inside a map value.
#[inline(always)]
pub unsafe fn add_shared(counter: *mut u64, n: u64) {
    // SAFETY: the caller promises that the pointer is valid, and every writer of a shared counter adds atomically. (The
    // library's atomic types cannot add on this target.)
    unsafe { core::intrinsics::atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(counter, n) };
}

/// Adds one to a counter that several CPUs may add to, and returns its previous value.
///
/// The ordering matters: for a relaxed addition the compiler emits the instruction without a result, even if the result
/// is used.
///
/// # Safety
/// As for [`add_shared`].
#[inline(always)]
pub unsafe fn take_number(counter: *mut u64) -> u64 {
    // SAFETY: as in `add_shared`.
    unsafe { core::intrinsics::atomic_xadd::<u64, u64, { AtomicOrdering::SeqCst }>(counter, 1) }
}

/// Replaces a number that several CPUs may write, if it still has the `expected` value. Returns whether it had.
///
/// # Safety
/// As for [`add_shared`].
#[inline(always)]
pub unsafe fn exchange_if_equal(number: *mut u64, expected: u64, new: u64) -> bool {
    const ORDER: AtomicOrdering = AtomicOrdering::SeqCst;
    // SAFETY: as in `add_shared`.
    unsafe { core::intrinsics::atomic_cxchg::<u64, ORDER, ORDER>(number, expected, new).1 }
}

/// Counters of a new process. Not on the BPF stack, because they would take half of it.
static NOTHING: Counters = {
    // SAFETY: `Counters` consists of integers only, so all zeros is a valid value.
    unsafe { core::mem::zeroed() }
};

/// Returns the totals of a process, and creates them if needed; `None` if there is no space.
#[inline(always)]
pub fn totals_of(process: ProcessKey) -> Option<*mut Counters> {
    TOTALS.get_ptr_mut(process).or_else(|| {
        let _ = TOTALS.insert(process, &NOTHING, u64::from(BPF_NOEXIST));
        TOTALS.get_ptr_mut(process)
    })
}

/// Returns the counters for what a thread without state does: the totals of its process, or the unattributed counters
/// if there is no space for these.
#[inline(always)]
pub fn without_state(process: ProcessKey) -> Option<*mut Counters> {
    totals_of(process).or_else(|| UNATTRIBUTED.get_ptr_mut(0))
}

/// Counts an allocation call, or an announced sample, by a thread without state.
#[inline(always)]
pub fn count_call_without_state() {
    if let Some(counters) = without_state(process_of(current_task())) {
        // SAFETY: the pointer is to a counter in a map's value.
        unsafe { add_shared(&raw mut (*counters).lost_no_thread_state, 1) };
    }
}

/// Counts a block that was freed although its entry in the live map could not be removed.
#[inline(always)]
pub fn count_removal_refused() {
    if let Some(counters) = UNATTRIBUTED.get_ptr_mut(0) {
        // SAFETY: the pointer is to a counter in the map's value.
        unsafe { add_shared(&raw mut (*counters).removals_refused, 1) };
    }
}

/// Counts a record that did not fit into the events ring. The daemon then searches for what the record would have
/// reported.
#[inline(always)]
pub fn count_record_lost() {
    if let Some(progress) = maps::progress() {
        // SAFETY: the pointer is to a counter in the map's value.
        unsafe { add_shared(&raw mut (*progress).records_lost, 1) };
    }
}

/// Counts a process event that did not fit into the events ring.
#[inline(always)]
pub fn count_process_event_lost() {
    if let Some(counters) = UNATTRIBUTED.get_ptr_mut(0) {
        // SAFETY: the pointer is to a counter in the map's value.
        unsafe { add_shared(&raw mut (*counters).process_events_lost, 1) };
    }
}
