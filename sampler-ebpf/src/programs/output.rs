//! Writes records to the events ring.

use aya_ebpf::bindings::{BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP};
use aya_ebpf::helpers::generated::{bpf_ktime_get_ns, bpf_ringbuf_discard, bpf_ringbuf_submit};
use sampler_ebpf::abi::{FreeRecord, LiveValue, ProcessKey, ProcessRecord, kind, ring};
use zerocopy::FromBytes;

use crate::config::config;
use crate::counters::{self, add_shared, count_process_event_lost, count_record_lost};
use crate::maps;
use crate::thread::ThreadState;

/// Reserves space for a record of the events ring. It must be submitted or discarded: the verifier rejects a program
/// that does neither.
#[inline(always)]
pub fn reserve<T: FromBytes>() -> Option<&'static mut T> {
    // SAFETY: the helper returns null or space for `size_of::<T>()` bytes, aligned to 8, which nothing else refers to.
    // Any bytes are a valid `T` (`FromBytes`).
    unsafe { maps::events()?.reserve(size_of::<T>() as u64).cast::<T>().as_mut() }
}

/// Submits a record of the events ring to the daemon.
///
/// # Safety
/// `record` must come from [`reserve`], and must not be used afterwards.
#[inline(always)]
pub unsafe fn submit<T>(record: &mut T) {
    let flags = wake_up(ring::EVENTS, 0);
    // SAFETY: the caller promises that `record` is a reservation. The reservation ends here.
    unsafe { bpf_ringbuf_submit(core::ptr::from_mut(record).cast(), flags) };
}

/// Returns the flags that decide whether submitting a record to this ring wakes the daemon. A wake-up costs more than a
/// microsecond. The daemon polls while it is awake, so only two things wake it: the first event of its sleep, and a
/// ring that is filling up. `record_bytes`: size of the record, if it may be larger than the range that counts as the
/// mark.
#[inline(never)]
#[unsafe(no_mangle)]
pub extern "C" fn wake_up(ring: u32, record_bytes: u64) -> u64 {
    let Some(ring) = maps::RINGS.get(ring) else { return u64::from(BPF_RB_NO_WAKEUP) };
    if let Some(sleep) = maps::SLEEP.get_ptr_mut(0) {
        // SAFETY: the pointer is to the map's value, an aligned u32. If two CPUs both read the 1, both wake the daemon.
        unsafe {
            if *sleep != 0 {
                *sleep = 0;
                return u64::from(BPF_RB_FORCE_WAKEUP);
            }
        }
    }
    let share = config!(wake_share);
    if share == 0 {
        return u64::from(BPF_RB_NO_WAKEUP);
    }
    let (fill, mark) = (ring.fill(), ring.size() / share);
    // Only while the fill level crosses the mark. The mark is several records wide, so that concurrent writers cannot
    // all miss it.
    if fill >= mark && fill < mark + mark / 8 + record_bytes {
        return u64::from(BPF_RB_FORCE_WAKEUP);
    }
    u64::from(BPF_RB_NO_WAKEUP)
}

/// The current time by CLOCK_MONOTONIC.
#[inline(always)]
pub fn now() -> u64 {
    // SAFETY: the helper takes no argument and returns an integer.
    unsafe { bpf_ktime_get_ns() }
}

/// Discards an unused reservation.
///
/// # Safety
/// As for [`submit`].
#[inline(always)]
pub unsafe fn discard<T>(record: &mut T) {
    // SAFETY: the caller promises that `record` is a reservation. The reservation ends here.
    unsafe { bpf_ringbuf_discard(core::ptr::from_mut(record).cast(), u64::from(BPF_RB_NO_WAKEUP)) };
}

/// Reports the free of a tracked sample that has already been removed from the live map. (A global function: the
/// verifier checks it once.)
#[inline(never)]
#[unsafe(no_mangle)]
pub extern "C" fn submit_free(state: *mut ThreadState, value: *const LiveValue) -> u32 {
    // SAFETY: the callers pass references.
    let (Some(state), Some(value)) = (unsafe { state.as_mut() }, unsafe { value.as_ref() }) else { return 0 };
    let record = reserve::<FreeRecord>();
    complete_free(state, value, record);
    0
}

/// Same as [`submit_free`], with a record that is already reserved; `None` means that there was no space.
#[inline(always)]
pub fn complete_free(state: &mut ThreadState, value: &LiveValue, record: Option<&'static mut FreeRecord>) {
    state.counters.frees_matched += 1;
    let Some(record) = record else {
        state.counters.frees_lost += 1;
        state.counters.frees_lost_bytes += value.size_bytes;
        count_record_lost();
        return;
    };
    let temporary = value.tid == state.tid && value.thread_calls == state.moment();
    write_free(record, state.tid, state.space, value, temporary);
}

/// Same as [`complete_free`], for a thread without state, which cannot know whether the block was temporary.
#[inline(always)]
pub fn complete_free_without_state(
    process: ProcessKey,
    tid: u32,
    space: ProcessKey,
    value: &LiveValue,
    record: Option<&'static mut FreeRecord>,
) {
    let counters = counters::without_state(process);
    if let Some(counters) = counters {
        // SAFETY: the pointer is to a counter in a map's value.
        unsafe { add_shared(&raw mut (*counters).frees_matched, 1) };
    }
    if let Some(record) = record {
        write_free(record, tid, space, value, false);
        return;
    }
    if let Some(counters) = counters {
        // SAFETY: as above.
        unsafe {
            add_shared(&raw mut (*counters).frees_lost, 1);
            add_shared(&raw mut (*counters).frees_lost_bytes, value.size_bytes);
        }
    }
    count_record_lost();
}

#[inline(always)]
fn write_free(record: &'static mut FreeRecord, tid: u32, space: ProcessKey, value: &LiveValue, temporary: bool) {
    *record = FreeRecord {
        kind: kind::FREE,
        tid,
        space,
        sample: value.sample,
        time_ns: now(),
        size_bytes: value.size_bytes,
        temporary: u32::from(temporary),
        reserved: 0,
    };
    // SAFETY: `record` was reserved by the caller or by `submit_free`, and is not used afterwards.
    unsafe { submit(record) };
}

/// Reports a process event, or counts that its record did not fit.
#[inline(always)]
pub fn submit_process(event: u32, process: ProcessKey, next: ProcessKey) {
    submit_process_with(event, process, next, 0);
}

/// Reports the end of a process, which has used this much CPU time, or counts that its record did not fit.
#[inline(always)]
pub fn submit_exit(process: ProcessKey, cpu_ns: u64) {
    let cpu_us = (cpu_ns / 1000).min(u64::from(u32::MAX));
    submit_process_with(kind::EXIT, process, ProcessKey::default(), cpu_us as u32);
}

#[inline(always)]
fn submit_process_with(event: u32, process: ProcessKey, next: ProcessKey, cpu_us: u32) {
    let Some(record) = reserve::<ProcessRecord>() else { return count_process_event_lost() };
    *record = ProcessRecord { kind: event, cpu_us, time_ns: now(), process, next };
    if event == kind::RESET || event == kind::FORK && config!(target_rules) == 0 {
        // The allocations of this process are not seen, or not named, until the daemon has examined it, so the daemon
        // is woken at once. (For children, this applies if targets are named individually.)
        // SAFETY: `record` was reserved above, and is not used afterwards.
        unsafe { bpf_ringbuf_submit(core::ptr::from_mut(record).cast(), u64::from(BPF_RB_FORCE_WAKEUP)) };
    } else {
        // SAFETY: as above.
        unsafe { submit(record) };
    }
}

/// Immediately reports the exec of a target to the reader, if one waits, or counts that there was no space.
#[inline(always)]
pub fn report_exec(tgid: u32) {
    let Some(ring) = maps::execs() else { return };
    // SAFETY: the helper returns null or space for four bytes, aligned to 8, which nothing else refers to.
    let Some(record) = (unsafe { ring.reserve(size_of::<u32>() as u64).cast::<u32>().as_mut() }) else {
        return count_process_event_lost();
    };
    *record = tgid;
    // SAFETY: `record` was reserved above, and is not used afterwards.
    unsafe { bpf_ringbuf_submit(core::ptr::from_mut(record).cast(), u64::from(BPF_RB_FORCE_WAKEUP)) };
}
