//! The sites of inline hooks: a call that was sampled inside the target, and what happens to a sampled block.
//!
//! `abi::inline` describes the registers. These programs produce the same records and live-map entries as the probes.
//! The target itself counts all calls and bytes. Here, a sampled call counts as entered, as sampled, and as also
//! counted by the target ([`Counters::inline_sampled`](sampler_ebpf::abi::Counters)).

use core::ffi::c_void;

use sampler_ebpf::abi::LiveValue;
use sampler_ebpf::abi::inline::{
    FREEING_SITE, NUMBER_BITS, REALLOCATING_SITE, SITE_KINDS, UNSEEN_SITE, UPPER_HALF, flag,
};
use sampler_ebpf::constants::LARGEST_CHOSEN_INTERVAL;
use sampler_ebpf::trials;

use crate::allocation::{self, LARGEST_SIZE};
use crate::arch::{self, register};
use crate::config::config;
use crate::context::cookie;
use crate::counters::{self, add_shared};
use crate::kernel_stack::use_kernel_stack;
use crate::live;
use crate::maps;
use crate::output;
use crate::process::{current_task, process_of};
use crate::thread::{Pending, SLOTS, ThreadState};

// Register numbers in the instruction set.
const RAX: u8 = 0;
const RCX: u8 = 1;
const RDX: u8 = 2;
const RSI: u8 = 6;
const RDI: u8 = 7;
const R8: u8 = 8;
const R9: u8 = 9;
const R10: u8 = 10;
const R11: u8 = 11;

/// Returns the site index of the function: the link's site index plus the function's number.
#[inline(always)]
fn site(ctx: *mut c_void) -> u32 {
    (register(ctx, R10) as u32).wrapping_add(cookie(ctx).0 as u32) & ((1 << NUMBER_BITS) - 1)
}

#[inline(always)]
fn flags(ctx: *mut c_void) -> u32 {
    (register(ctx, R10) >> UPPER_HALF) as u32
}

/// Runs at any site of inline hooks; the cookie says which.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe/inline_site")]
pub extern "C" fn inline_site(ctx: *mut c_void) -> u32 {
    use_kernel_stack(ctx);
    match cookie(ctx).0 & SITE_KINDS {
        FREEING_SITE => freeing(ctx),
        REALLOCATING_SITE => reallocating(ctx),
        kind => result(ctx, kind != UNSEEN_SITE),
    }
    0
}

/// Runs after a call whose outcome is known, or before a sampled call whose result will not be seen.
#[inline(always)]
fn result(ctx: *mut c_void, is_seen: bool) {
    let sampled = !is_seen || flags(ctx) & flag::SAMPLED != 0;
    let size = if is_seen { register(ctx, RSI) } else { register(ctx, R11) };
    let Some(state) = ThreadState::of_any_target(move || lose(sampled, size)) else { return };
    // Without an address, the sample counts as untracked.
    let mut address = 0;
    let (offset, interval) = if is_seen {
        if register(ctx, R9) != 0 {
            end_reallocation(ctx, state);
        }
        if !sampled {
            return;
        }
        note_calls(ctx, state, register(ctx, RDX));
        if flags(ctx) & flag::UNTRACKED == 0 {
            address = register(ctx, RDI);
        } else if config!(live) != 0 {
            state.counters.set_full += 1;
        }
        (register(ctx, RCX), register(ctx, R8))
    } else {
        state.moments = state.moments.wrapping_add(1);
        let draw = register(ctx, RAX);
        (draw & 0xffff_ffff, draw >> UPPER_HALF)
    };
    report(ctx, state, &Sampled::of(size, offset, interval), address);
}

/// Runs before a sampled block is freed.
#[inline(always)]
fn freeing(ctx: *mut c_void) {
    let block = register(ctx, R11);
    let lose = move || live::release_without_state(block);
    let Some(state) = ThreadState::of_any_target(lose) else { return };
    note_calls(ctx, state, register(ctx, RAX));
    live::release(state, block);
}

/// Runs before a sampled block is reallocated. The block leaves the live map until the outcome is known.
#[inline(always)]
fn reallocating(ctx: *mut c_void) {
    let block = register(ctx, R11);
    let lose = move || live::report_without_state(block);
    let Some(state) = ThreadState::of_any_target(lose) else { return };
    note_calls(ctx, state, register(ctx, RAX));
    if config!(live) != 0 {
        begin_reallocation(ctx, state, block);
    }
}

/// Takes the old block out of the live map. (A separate function, for its stack.)
#[inline(never)]
fn begin_reallocation(ctx: *mut c_void, state: &mut ThreadState, block: u64) {
    // The block may be a sample of an earlier recording.
    let mut old = LiveValue::default();
    if !live::take_out(state, block, &mut old) {
        return;
    }
    let sp = arch::stack_pointer(ctx);
    let slot = state.open_slot(sp) & (SLOTS - 1);
    state.slots[slot] = Pending {
        sp,
        caller: arch::return_address(ctx, sp),
        old_address: block,
        old,
        site: site(ctx),
        sampled: 0,
        ..Pending::OVER
    };
}

/// Records the thread's number of calls, which is used to recognise blocks that are freed before the next call.
#[inline(always)]
fn note_calls(ctx: *mut c_void, state: &mut ThreadState, calls: u64) {
    state.moments = if flags(ctx) & flag::SHARED_SLOT == 0 { calls } else { state.moments.wrapping_add(1) };
}

/// The target's description of a sampled call.
struct Sampled {
    size: u64,
    offset: u64,
    interval: u64,
}

impl Sampled {
    /// Limits the values, because the registers may contain anything.
    #[inline(always)]
    fn of(size: u64, offset: u64, interval: u64) -> Self {
        Self { size: size.min(LARGEST_SIZE), offset, interval: interval.min(LARGEST_CHOSEN_INTERVAL) }
    }
}

/// Reports a sampled call. (A separate function, for its stack.)
#[inline(never)]
fn report(ctx: *mut c_void, state: &mut ThreadState, call: &Sampled, address: u64) {
    state.calls += 1;
    state.counters.sampled += 1;
    state.counters.inline_sampled += 1;
    state.counters.inline_sampled_bytes += call.size;
    let sp = arch::stack_pointer(ctx);
    let trials = trials::trials(config!(criterion), call.size, maps::trials_of_class);
    let pending = state.keep_inline_call(Pending {
        sp,
        size: call.size,
        trials,
        offset: call.offset.min(trials),
        interval: call.interval,
        caller: arch::return_address(ctx, sp),
        site: site(ctx),
        ..Pending::OVER
    });
    let mut registers = arch::registers(ctx);
    registers.ip = pending.caller;
    registers.sp = sp.wrapping_add(arch::RETURN_SLOT);
    allocation::report(ctx, &registers, state, pending, address, config!(live) != 0);
}

/// Handles the outcome for the old block.
#[inline(never)]
fn end_reallocation(ctx: *mut c_void, state: &mut ThreadState) {
    // There is none if the block was not in the live map.
    let Some(slot) = state.take_pending(arch::stack_pointer(ctx)) else { return };
    let pending = state.slot(slot);
    if flags(ctx) & flag::FAILED != 0 {
        live::put_back(state, pending.old_address, &pending.old);
    } else if pending.old_address != 0 {
        output::submit_free(state, &pending.old);
    }
}

/// Counts a sampled call that requested `size` bytes, by a thread without state. The target has counted the call
/// itself.
#[inline(never)]
fn lose(sampled: bool, size: u64) {
    if !sampled {
        return;
    }
    if let Some(counters) = counters::without_state(process_of(current_task())) {
        // SAFETY: the pointers are to counters in a map's value.
        unsafe {
            add_shared(&raw mut (*counters).lost_no_thread_state, 1);
            add_shared(&raw mut (*counters).inline_sampled, 1);
            add_shared(&raw mut (*counters).inline_sampled_bytes, size.min(LARGEST_SIZE));
        }
    }
}
