//! Mappings that programs make themselves (`--mmap`): mmap, munmap, mremap and brk. They are traced as system calls, so
//! that programs without libc and allocators that make their own system calls are covered too.
//!
//! A call is processed when its result is known. Mappings that an allocator makes for itself are not counted: under
//! `--mmap` every allocation call is tracked until it returns, and system calls made inside an in-flight call are
//! reentrant.

use core::ffi::c_void;

use sampler_ebpf::abi::{LiveValue, UnmapRecord, kind, mapping};
use sampler_ebpf::trials;

use crate::allocation;
use crate::arch::{SystemCall, number};
use crate::config::config;
use crate::context::argument;
use crate::maps::{self, THREADS};
use crate::memory::read_kernel;
use crate::output;
use crate::process::{current_pid_tgid, current_task};
use crate::target::is_target;
use crate::thread::{Pending, ThreadState};

const MAP_FIXED: u64 = 0x10;
const MAP_ANONYMOUS: u64 = 0x20;
const MREMAP_DONTUNMAP: u64 = 4;
/// Results from here on are negated error numbers.
const FIRST_ERROR: u64 = 4096_u64.wrapping_neg();

/// The calling thread's state if it belongs to a target. The tracepoints fire for every process of the host, and
/// threads of other processes get no state.
#[inline(always)]
fn state_of_target() -> Option<&'static mut ThreadState> {
    if THREADS.current().is_none() && !is_target((current_pid_tgid() >> 32) as u32) {
        return None;
    }
    ThreadState::of_target()
}

/// `sys_enter(registers, number)`: notes when one of the four calls began, and where the heap of brk ended.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/sys_enter")]
pub extern "C" fn system_call_entry(ctx: *mut c_void) -> u32 {
    let number = argument(ctx, 1);
    if !matches!(number, number::MMAP | number::MUNMAP | number::MREMAP | number::BRK) {
        return 0;
    }
    let Some(state) = state_of_target() else { return 0 };
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

/// `sys_exit(registers, result)`: records what one of the four calls did.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/sys_exit")]
pub extern "C" fn system_call_exit(ctx: *mut c_void) -> u32 {
    let (call, result) = (SystemCall(argument(ctx, 0)), argument(ctx, 1));
    let number = call.number();
    if !matches!(number, number::MMAP | number::MUNMAP | number::MREMAP | number::BRK)
        || result >= FIRST_ERROR
        || !call.is_native()
    {
        return 0;
    }
    let Some(state) = state_of_target() else { return 0 };
    let (first, second, flags) = (call.argument(0), call.argument(1), call.argument(3));
    let (gone, site, address, size) = match number {
        // munmap(address, length)
        number::MUNMAP => (pages(first, second), 0, 0, 0),
        // mmap(address, length, protection, flags, …). Mappings of files do not count: they are not memory that the
        // program requested.
        number::MMAP => {
            let gone = if flags & MAP_FIXED != 0 { pages(result, second) } else { (0, 0) };
            (gone, mapping::MMAP, result, if flags & MAP_ANONYMOUS != 0 { second } else { 0 })
        }
        // mremap(address, length, new length, flags, …). Like realloc, it frees the old range and allocates the new
        // one. With a length of 0 it maps shared pages a second time.
        number::MREMAP => {
            let stays = flags & MREMAP_DONTUNMAP != 0 || second == 0;
            let gone = if stays { (0, 0) } else { pages(first, second) };
            (gone, mapping::MREMAP, result, call.argument(2))
        }
        // brk(end) returns the end of the heap, moved or not. The end is exact to the byte, because what is above it
        // belongs to the next call.
        _ => {
            let begin = state.mapping_brk;
            if begin == 0 {
                return 0;
            }
            ((result, begin), mapping::BRK, begin, if result > begin { result - begin } else { 0 })
        }
    };
    if gone.0 < gone.1 {
        submit_unmap(state, gone.0, gone.1);
    }
    if size != 0 {
        mapped(ctx, &call, state, site, address, size);
    }
    0
}

/// The kernel unmaps whole pages, even if the length is not a multiple of the page size.
#[inline(always)]
fn pages(address: u64, length: u64) -> (u64, u64) {
    let in_page = config!(page_bytes) - 1;
    (address, address.wrapping_add(length).wrapping_add(in_page) & !in_page)
}

/// Counts a mapping as an allocation, unless an allocator made it for itself.
#[inline(always)]
fn mapped(ctx: *mut c_void, call: &SystemCall, state: &mut ThreadState, site: u32, address: u64, size: u64) {
    let registers = call.registers();
    // A call that jumped to the system call is in flight at its stack pointer.
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
        out: 0,
        old_address: 0,
        old: LiveValue::default(),
        site,
        sampled: 1,
        return_sites_probed: 0,
        may_throw: 0,
    };
    // The daemon knows which parts of a mapping are left. The live map holds whole blocks only.
    allocation::report(ctx, &registers, state, &sample, address, false);
}

#[inline(always)]
fn submit_unmap(state: &mut ThreadState, start: u64, end: u64) {
    if config!(live) == 0 {
        return;
    }
    let Some(record) = output::reserve::<UnmapRecord>(maps::events()) else {
        state.counters.frees_lost += 1;
        return;
    };
    *record =
        UnmapRecord { kind: kind::UNMAP, tid: state.tid, space: state.space, start, end, time_ns: state.mapping_ns };
    // SAFETY: `record` was reserved above, and is not used afterwards.
    unsafe { output::submit(record) };
}
