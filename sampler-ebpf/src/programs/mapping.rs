//! Mappings that programs make themselves (`--mmap`): mmap, munmap, mremap and brk. They are traced as system calls, so
//! that programs without libc and allocators that make their own system calls are covered too.
//!
//! A call is processed when its result is known. Mappings that an allocator makes for itself are not counted: under
//! `--mmap` every allocation call is tracked until it returns, and system calls made inside an in-flight call are
//! reentrant.

use core::ffi::c_void;

use sampler_ebpf::abi::{UnmapRecord, kind, mapping};
use sampler_ebpf::trials;

use crate::allocation;
use crate::arch::{SystemCall, number};
use crate::config::config;
use crate::context::argument;
use crate::counters::{self, add_shared, count_record_lost};
use crate::maps::{self, THREADS};
use crate::memory::read_kernel;
use crate::output;
use crate::process::{current_pid_tgid, current_task, process_of};
use crate::target::is_target;
use crate::thread::{Pending, ThreadState};

const MAP_FIXED: u64 = 0x10;
const MAP_ANONYMOUS: u64 = 0x20;
const MREMAP_DONTUNMAP: u64 = 4;
/// Replaces the time at which a call began: [`system_call_exit`] has seen its end.
const SEEN: u64 = u64::MAX;
/// Results from this value on are negated error numbers.
const FIRST_ERROR: u64 = 4096_u64.wrapping_neg();

/// Returns the calling thread's state if it belongs to a target. The tracepoints fire for every process on the host;
/// threads of other processes get no state.
#[inline(always)]
fn state_of_target(without_state: impl FnOnce()) -> Option<&'static mut ThreadState> {
    if THREADS.current().is_none() && !is_target((current_pid_tgid() >> 32) as u32) {
        return None;
    }
    ThreadState::of_any_target(without_state)
}

/// `sys_enter(registers, number)`: records when one of the four calls began, and where the brk heap ended.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/sys_enter")]
pub extern "C" fn system_call_entry(ctx: *mut c_void) -> u32 {
    let number = argument(ctx, 1);
    if !matches!(number, number::MMAP | number::MUNMAP | number::MREMAP | number::BRK) {
        return 0;
    }
    // Without state, the exit finds that the entry was not recorded, and counts that.
    let Some(state) = state_of_target(|| ()) else { return 0 };
    state.mapping_ns = output::now();
    state.mapping_brk = end_of_heap();
    0
}

#[inline(always)]
fn end_of_heap() -> u64 {
    let task = current_task();
    let mm: u64 = read_kernel(task + config!(offsets.task_mm));
    read_kernel(mm + config!(offsets.mm_brk))
}

/// The effect of one of the four calls.
struct Effect {
    /// The addresses that it unmapped: start and end. For brk, the start is the new end of the heap.
    gone: (u64, u64),
    /// The mapping that it made: one of [`mapping`], address and size. The size is 0 if it made none.
    site: u32,
    address: u64,
    size: u64,
}

impl Effect {
    /// Returns the effect of a call that succeeded with this result. `brk`: where the heap ended before.
    #[inline(always)]
    fn of(call: &SystemCall, number: u64, result: u64, brk: u64) -> Self {
        let (first, second, flags) = (call.argument(0), call.argument(1), call.argument(3));
        match number {
            // munmap(address, length)
            number::MUNMAP => Self { gone: pages(first, second), site: 0, address: 0, size: 0 },
            // mmap(address, length, protection, flags, …). Mappings of files do not count, because they are not memory
            // that the program requested.
            number::MMAP => {
                let gone = if flags & MAP_FIXED != 0 { pages(result, second) } else { (0, 0) };
                let size = if flags & MAP_ANONYMOUS != 0 { second } else { 0 };
                Self { gone, site: mapping::MMAP, address: result, size }
            }
            // mremap(address, length, new length, flags, …). Like realloc, it frees the old range and allocates the new
            // one. With a length of 0 it maps shared pages a second time.
            number::MREMAP => {
                let stays = flags & MREMAP_DONTUNMAP != 0 || second == 0;
                let gone = if stays { (0, 0) } else { pages(first, second) };
                Self { gone, site: mapping::MREMAP, address: result, size: call.argument(2) }
            }
            // brk(end) returns the end of the heap, whether it moved or not. The end is exact to the byte, because what
            // is above it belongs to the next call.
            _ => Self { gone: (result, brk), site: mapping::BRK, address: brk, size: result.saturating_sub(brk) },
        }
    }
}

/// `sys_exit(registers, result)`: handles the end of one of the four calls.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/sys_exit")]
pub extern "C" fn system_call_exit(ctx: *mut c_void) -> u32 {
    ended(ctx, false)
}

/// Same as [`system_call_exit`], and runs after it. Does the work if the kernel has skipped that program, as Linux 7.0
/// and later may.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/sys_exit")]
pub extern "C" fn again_at_call_exit(ctx: *mut c_void) -> u32 {
    ended(ctx, true)
}

#[inline(always)]
fn ended(ctx: *mut c_void, again: bool) -> u32 {
    let (call, result) = (SystemCall(argument(ctx, 0)), argument(ctx, 1));
    let number = call.number();
    if !matches!(number, number::MMAP | number::MUNMAP | number::MREMAP | number::BRK) || !call.is_native() {
        return 0;
    }
    let without_state = move || {
        if !again {
            lose(call, number, result);
        }
    };
    let Some(state) = state_of_target(without_state) else { return 0 };
    let begun_ns = core::mem::replace(&mut state.mapping_ns, if again { 0 } else { SEEN });
    if again && begun_ns == SEEN {
        return 0;
    }
    // If this call's entry was not seen, this is the mark of an earlier call.
    let begun_ns = if begun_ns == SEEN { 0 } else { begun_ns };
    if result >= FIRST_ERROR {
        return 0;
    }
    if begun_ns == 0 {
        state.counters.system_calls_lost += 1;
        if number == number::BRK {
            // How far it moved the end of the heap is not known.
            lose_unmap(state, 0);
            return 0;
        }
    }
    let effect = Effect::of(&call, number, result, state.mapping_brk);
    let (start, end) = effect.gone;
    if start < end && config!(live) != 0 {
        if begun_ns == 0 {
            lose_unmap(state, end - start);
        } else {
            submit_unmap(state, start, end, begun_ns);
        }
    }
    if effect.size != 0 {
        mapped(ctx, &call, state, effect.site, effect.address, effect.size);
    }
    0
}

/// Counts the call of a thread without state.
#[inline(always)]
fn lose(call: SystemCall, number: u64, result: u64) {
    if result >= FIRST_ERROR {
        return;
    }
    let Some(counters) = counters::without_state(process_of(current_task())) else { return };
    // The heap already ends where this call put it, so whether it grew or shrank is not known.
    let effect = Effect::of(&call, number, result, result);
    let (start, end) = effect.gone;
    // SAFETY: the pointer is to a counter in a map's value.
    unsafe {
        add_shared(&raw mut (*counters).system_calls_lost, 1);
        add_shared(&raw mut (*counters).lost_no_thread_state, u64::from(effect.size != 0));
        if start < end || number == number::BRK {
            add_shared(&raw mut (*counters).unmaps_lost, 1);
            add_shared(&raw mut (*counters).unmaps_lost_bytes, end.saturating_sub(start));
            count_record_lost();
        }
    }
}

/// Returns the pages that the kernel unmaps: whole ones, even if the length is not a multiple of the page size.
#[inline(always)]
pub fn pages(address: u64, length: u64) -> (u64, u64) {
    let in_page = config!(page_bytes) - 1;
    (address, address.wrapping_add(length).wrapping_add(in_page) & !in_page)
}

/// Counts a mapping as an allocation, unless an allocator made it for itself.
#[inline(always)]
fn mapped(ctx: *mut c_void, call: &SystemCall, state: &mut ThreadState, site: u32, address: u64, size: u64) {
    let registers = call.registers();
    state.calls += 1;
    // A function that jumped to the system call is in flight at the same stack pointer.
    if state.is_below_outer(registers.sp, |_| true) {
        state.counters.reentrant += 1;
        return;
    }
    let trials = trials::trials(config!(criterion), size, maps::trials_of_class);
    let Some(success) = state.count_down(trials, size) else { return };
    let sample = Pending {
        sp: registers.sp,
        size,
        trials,
        offset: success.offset,
        interval: success.interval,
        caller: registers.ip,
        site,
        ..Pending::OVER
    };
    // The daemon tracks which parts of a mapping are left. The live map only holds whole blocks.
    state.counters.sampled_bytes += sample.size;
    if !allocation::report(ctx, &registers, state, &sample, address, false) {
        state.counters.mappings_lost += 1;
        state.counters.mappings_lost_bytes += size;
    }
}

/// Reports that a range of addresses was unmapped at `time_ns` (CLOCK_MONOTONIC), or counts that this is not possible.
#[inline(always)]
pub fn submit_unmap(state: &mut ThreadState, start: u64, end: u64, time_ns: u64) {
    let Some(record) = output::reserve::<UnmapRecord>() else { return lose_unmap(state, end - start) };
    *record = UnmapRecord { kind: kind::UNMAP, tid: state.tid, space: state.space, start, end, time_ns };
    // SAFETY: `record` was reserved above, and is not used afterwards.
    unsafe { output::submit(record) };
}

/// Counts an unmapping that is not reported. The daemon then checks what is mapped.
#[inline(always)]
fn lose_unmap(state: &mut ThreadState, bytes: u64) {
    state.counters.unmaps_lost += 1;
    state.counters.unmaps_lost_bytes += bytes;
    count_record_lost();
}

/// Counts an unmapping of an unknown size that is not reported.
#[inline(always)]
pub fn lose_unknown_unmap(state: &mut ThreadState) {
    state.counters.system_calls_lost += 1;
    lose_unmap(state, 0);
}

/// Counts an unmapping by a thread without state.
#[inline(always)]
pub fn lose_unmap_without_state(bytes: u64) {
    let Some(counters) = counters::without_state(process_of(current_task())) else { return };
    // SAFETY: the pointers are to counters in a map's value.
    unsafe {
        add_shared(&raw mut (*counters).unmaps_lost, 1);
        add_shared(&raw mut (*counters).unmaps_lost_bytes, bytes);
    }
    count_record_lost();
}
