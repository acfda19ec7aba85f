//! Counters that several CPUs add to.

use core::intrinsics::AtomicOrdering;

use crate::maps::{self, UNATTRIBUTED};

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

/// Counts a hit of a thread for which the kernel had no state.
#[inline(always)]
pub fn count_no_thread_state() {
    if let Some(counters) = UNATTRIBUTED.get_ptr_mut(0) {
        // SAFETY: the pointer is to a counter in the map's value.
        unsafe { add_shared(&raw mut (*counters).lost_no_thread_state, 1) };
    }
}

/// Counts a record that did not fit into the events ring. The daemon then looks for what the record would have
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
