//! Samples that a program announces itself, through USDT probes of the provider `otel_memory`: which allocation was
//! sampled, what it stands for, and that it is freed.
//!
//! These programs produce the same records and live-map entries as probes on allocators. Only the sample's interval is
//! not known here, so it is 0, and the number of trials is the number of bytes that the program says the sample stands
//! for. The daemon derives the interval from it. Mappings are announced without a weight, each of them: their interval
//! is 1.

use core::ffi::c_void;

use sampler_ebpf::abi::{Cookie, Operand, Registers, place};

use crate::allocation;
use crate::arch::{self, register};
use crate::config::config;
use crate::context::cookie;
use crate::counters::count_call_without_state;
use crate::kernel_stack::use_kernel_stack;
use crate::live;
use crate::mapping;
use crate::maps;
use crate::memory::read_user;
use crate::output;
use crate::thread::{Pending, ThreadState};

/// Size of the probed no-op, bytes.
const NO_OP_BYTES: u64 = 1;

/// `alloc(pointer, size, weighted_bytes)`, or `mmap(address, size)`.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe/usdt_alloc")]
pub extern "C" fn usdt_alloc(ctx: *mut c_void) -> u32 {
    use_kernel_stack(ctx);
    let probe = cookie(ctx);
    if let Some(state) = ThreadState::of_announcing_target(probe.link_kind(), count_call_without_state) {
        announced(ctx, state, probe.index());
    }
    0
}

/// `free(pointer)`, before the block is freed, or `munmap(address, size)`.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe/usdt_free")]
pub extern "C" fn usdt_free(ctx: *mut c_void) -> u32 {
    use_kernel_stack(ctx);
    let probe = cookie(ctx);
    let mut block = 0;
    let is_read = argument(ctx, probe.index(), 0, &mut block);
    if is_read && block == 0 {
        return 0;
    }
    if has_argument(probe.index(), 1) {
        unmapped(ctx, probe, block);
        return 0;
    }
    if !is_read {
        return 0;
    }
    let lose = move || live::release_without_state(block);
    let Some(state) = ThreadState::of_announcing_target(probe.link_kind(), lose) else { return 0 };
    // Whether the thread has allocated since is not known, so the block must not count as temporary.
    state.moments = state.moments.wrapping_add(1);
    live::release(state, block);
    0
}

/// Reports that a program has unmapped memory. `start` is 0 if it could not be read. (A separate function, for its
/// stack.)
#[inline(never)]
fn unmapped(ctx: *mut c_void, probe: Cookie, start: u64) {
    let mut size = 0;
    let is_read = argument(ctx, probe.index(), 1, &mut size) && start != 0;
    let (start, end) = mapping::pages(start, size);
    let lose = move || mapping::lose_unmap_without_state(end.saturating_sub(start));
    let Some(state) = ThreadState::of_announcing_target(probe.link_kind(), lose) else { return };
    if !is_read {
        mapping::lose_unknown_unmap(state);
    } else if start < end {
        mapping::submit_unmap(state, start, end, output::now());
    }
}

/// Reports a sample, or a mapping.
#[inline(never)]
fn announced(ctx: *mut c_void, state: &mut ThreadState, site: u32) {
    state.calls += 1;
    state.counters.sampled += 1;
    state.counters.announced += 1;
    let mut address = 0;
    if !keep(ctx, state, site, &mut address) {
        state.counters.lost_result_unreadable += 1;
        return;
    }
    let pending = state.kept_inline_call();
    let registers = Registers { ip: pending.caller, sp: pending.sp, fp: arch::frame_pointer(ctx), lr: 0 };
    // The daemon tracks which parts of a mapping are left. The live map only holds whole blocks.
    let is_mapping = pending.interval != 0;
    let follow = config!(live) != 0 && !is_mapping;
    if !allocation::report(ctx, &registers, state, pending, address, follow) && is_mapping {
        state.counters.mappings_lost += 1;
        state.counters.mappings_lost_bytes += pending.size;
    }
}

/// Stores a program's description of a sample in the thread's state; `false` if it cannot be read. (A separate
/// function, for its stack.)
#[inline(never)]
fn keep(ctx: *mut c_void, state: &mut ThreadState, site: u32, address: &mut u64) -> bool {
    let (mut size, mut weighted) = (0, 0);
    if !argument(ctx, site, 0, address) || !argument(ctx, site, 1, &mut size) {
        return false;
    }
    let is_mapping = !has_argument(site, 2);
    if is_mapping {
        weighted = size.max(1);
    } else if !argument(ctx, site, 2, &mut weighted) {
        return false;
    }
    state.keep_inline_call(Pending {
        sp: arch::stack_pointer(ctx),
        size,
        trials: weighted,
        interval: u64::from(is_mapping),
        // To the unwinder, the address after the no-op is like a return address: it looks up the instruction before it.
        caller: arch::instruction_pointer(ctx).wrapping_add(NO_OP_BYTES),
        site,
        ..Pending::OVER
    });
    true
}

/// Whether a site's probe has an argument.
#[inline(always)]
fn has_argument(site: u32, index: usize) -> bool {
    maps::SITES.get(site).is_some_and(|site| Operand(site.operands[index]).place() != place::NONE)
}

/// Reads an argument of a site's probe; `false` if there is none, or its memory cannot be read.
#[inline(never)]
fn argument(ctx: *mut c_void, site: u32, index: usize, value: &mut u64) -> bool {
    let Some(site) = maps::SITES.get(site) else { return false };
    let operand = Operand(match index {
        0 => site.operands[0],
        1 => site.operands[1],
        _ => site.operands[2],
    });
    let word = match operand.place() {
        place::CONSTANT => operand.displacement(),
        place::REGISTER => register(ctx, operand.register_number()),
        place::MEMORY => {
            let address = register(ctx, operand.register_number()).wrapping_add(operand.displacement());
            let read = match operand.bytes() {
                1 => read_user::<u8>(address).map(u64::from),
                2 => read_user::<u16>(address).map(u64::from),
                4 => read_user::<u32>(address).map(u64::from),
                _ => read_user::<u64>(address),
            };
            let Some(word) = read else { return false };
            word
        }
        _ => return false,
    };
    *value = operand.value(word);
    true
}
