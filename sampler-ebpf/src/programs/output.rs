//! Records into the events ring.

use core::ffi::c_void;

use aya_ebpf::bindings::{BPF_RB_AVAIL_DATA, BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP};
use aya_ebpf::helpers::generated::{
    bpf_ktime_get_ns, bpf_ringbuf_discard, bpf_ringbuf_query, bpf_ringbuf_reserve, bpf_ringbuf_submit,
};
use sampler_ebpf::abi::{FreeRecord, LiveValue, ProcessKey, ProcessRecord, kind};

use crate::config::config;
use crate::maps;
use crate::state::ThreadState;

/// Room for a record, which must be submitted or discarded.
#[inline(always)]
pub fn reserve<T>(ring: *mut c_void) -> Option<&'static mut T> {
    // SAFETY: the helper returns NULL or room for `size_of::<T>()` bytes; every `T` used here is plain integers.
    unsafe { bpf_ringbuf_reserve(ring, size_of::<T>() as u64, 0).cast::<T>().as_mut() }
}

/// Gives a record to the daemon.
#[inline(always)]
pub fn submit<T>(record: &mut T, ring: *mut c_void, mark: u64) {
    let flags = wake_up(ring, mark);
    // SAFETY: `record` was reserved.
    unsafe { bpf_ringbuf_submit(core::ptr::from_mut(record).cast(), flags) };
}

/// A wake-up costs more than a microsecond, so the daemon looks by itself while it is awake; only the first event of
/// its sleep and a ring that is filling up wake it.
#[inline(always)]
pub fn wake_up(ring: *mut c_void, mark: u64) -> u64 {
    if let Some(sleep) = maps::SLEEP.get_ptr_mut(0) {
        // SAFETY: the map's value. Two CPUs may both see the 1: then both wake the daemon.
        unsafe {
            if *sleep != 0 {
                *sleep = 0;
                return u64::from(BPF_RB_FORCE_WAKEUP);
            }
        }
    }
    // SAFETY: a helper call.
    let fill = unsafe { bpf_ringbuf_query(ring, u64::from(BPF_RB_AVAIL_DATA)) };
    // Only while the fill crosses the mark: several records wide, so that concurrent writers cannot all miss it.
    if fill >= mark && fill < mark + mark / 8 {
        return u64::from(BPF_RB_FORCE_WAKEUP);
    }
    u64::from(BPF_RB_NO_WAKEUP)
}

/// CLOCK_MONOTONIC.
#[inline(always)]
pub fn now() -> u64 {
    // SAFETY: no argument.
    unsafe { bpf_ktime_get_ns() }
}

/// Gives a reservation back unused.
#[inline(always)]
pub fn discard<T>(record: &mut T) {
    // SAFETY: `record` was reserved.
    unsafe { bpf_ringbuf_discard(core::ptr::from_mut(record).cast(), u64::from(BPF_RB_NO_WAKEUP)) };
}

/// Counts a record that did not fit into the events ring: the daemon looks for what it was about.
#[inline(always)]
pub fn count_record_lost() {
    if let Some(progress) = maps::progress() {
        // SAFETY: a field of a map value.
        maps::add_shared(unsafe { &raw mut (*progress).records_lost }, 1);
    }
}

/// Reports the free of a tracked sample, already taken out of the live map.
#[inline(always)]
pub fn submit_free(state: &mut ThreadState, value: &LiveValue) {
    let record = reserve::<FreeRecord>(maps::events());
    complete_free(state, value, record);
}

/// The same in a record that is reserved already; `None`: there was no room.
#[inline(always)]
pub fn complete_free(state: &mut ThreadState, value: &LiveValue, record: Option<&'static mut FreeRecord>) {
    state.counters.frees_matched += 1;
    let Some(record) = record else {
        state.counters.frees_lost += 1;
        state.counters.frees_lost_bytes += value.size_bytes;
        count_record_lost();
        return;
    };
    *record = FreeRecord {
        kind: kind::FREE,
        tid: state.tid,
        space: state.space,
        sample: value.sample,
        time_ns: now(),
        size_bytes: value.size_bytes,
        temporary: u32::from(value.tid == state.tid && value.thread_calls == state.calls()),
        reserved: 0,
    };
    submit(record, maps::events(), config!(events_mark));
}

/// Reports that a process forked, exec'ed or ended. Returns whether it could.
#[inline(always)]
pub fn submit_process(event: u32, child_tgid: u32, process: ProcessKey, next: ProcessKey) -> bool {
    let Some(record) = reserve::<ProcessRecord>(maps::events()) else { return false };
    *record = ProcessRecord { kind: event, child_tgid, time_ns: now(), process, next };
    if event == kind::FORK {
        // The child allocates unseen until the daemon has linked it: there is no time to lose.
        // SAFETY: `record` was reserved.
        unsafe { bpf_ringbuf_submit(core::ptr::from_mut(record).cast(), u64::from(BPF_RB_FORCE_WAKEUP)) };
    } else {
        submit(record, maps::events(), config!(events_mark));
    }
    true
}
