//! Samples that a program announces itself, through USDT probes of the provider `otel_memory`: which allocation was
//! sampled, what it stands for, and that it is freed.
//!
//! These programs produce the same records and live-map entries as probes on allocators. Only the sample's interval is
//! not known here, so it is 0, and the number of trials is the number of bytes that the program says the sample stands
//! for. The daemon derives the interval from it.

use core::ffi::c_void;

use sampler_ebpf::abi::{Operand, Registers, place};

use crate::allocation;
use crate::arch::{self, register};
use crate::config::config;
use crate::context::cookie;
use crate::counters::{self, add_shared};
use crate::kernel_stack::use_kernel_stack;
use crate::live;
use crate::maps;
use crate::memory::read_user;
use crate::process::{current_task, process_of};
use crate::thread::{Pending, ThreadState};

/// Size of the probed no-op, bytes.
const NO_OP_BYTES: u64 = 1;

/// `alloc(pointer, size, weighted_bytes)`.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe/usdt_alloc")]
pub extern "C" fn usdt_alloc(ctx: *mut c_void) -> u32 {
    use_kernel_stack(ctx);
    let probe = cookie(ctx);
    if let Some(state) = ThreadState::of_announcing_target(probe.link_kind(), lose) {
        announced(ctx, state, probe.index());
    }
    0
}

/// `free(pointer)`, before the block is freed.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe/usdt_free")]
pub extern "C" fn usdt_free(ctx: *mut c_void) -> u32 {
    use_kernel_stack(ctx);
    let probe = cookie(ctx);
    let mut block = 0;
    if !argument(ctx, probe.index(), 0, &mut block) || block == 0 {
        return 0;
    }
    let lose = move || live::release_without_state(block);
    let Some(state) = ThreadState::of_announcing_target(probe.link_kind(), lose) else { return 0 };
    // Whether the thread has allocated since is not known, so the block must not count as temporary.
    state.moments = state.moments.wrapping_add(1);
    live::release(state, block);
    0
}

/// Reports a sample.
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
    allocation::report(ctx, &registers, state, pending, address, config!(live) != 0);
}

/// Stores a program's description of a sample in the thread's state; `false` if it cannot be read. (A separate
/// function, for its stack.)
#[inline(never)]
fn keep(ctx: *mut c_void, state: &mut ThreadState, site: u32, address: &mut u64) -> bool {
    let (mut size, mut weighted) = (0, 0);
    if !argument(ctx, site, 0, address) || !argument(ctx, site, 1, &mut size) || !argument(ctx, site, 2, &mut weighted)
    {
        return false;
    }
    state.keep_inline_call(Pending {
        sp: arch::stack_pointer(ctx),
        size,
        trials: weighted,
        // To the unwinder, the address after the no-op is like a return address: it looks up the instruction before it.
        caller: arch::instruction_pointer(ctx).wrapping_add(NO_OP_BYTES),
        site,
        ..Pending::OVER
    });
    true
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

/// Counts a sample by a thread without state.
#[inline(never)]
fn lose() {
    if let Some(counters) = counters::without_state(process_of(current_task())) {
        // SAFETY: the pointer is to a counter in a map's value.
        unsafe { add_shared(&raw mut (*counters).lost_no_thread_state, 1) };
    }
}
