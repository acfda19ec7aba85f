//! Allocation functions: the sampling decision at the entry, the outcome at the return.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::bpf_get_current_comm;
use sampler_ebpf::abi::{
    ALWAYS, AllocationRecord, Cookie, IN_REGISTER, LiveValue, NO_ARGUMENT, Registers, ResultLocation,
    SESSION_IS_RETURN, SHAPE_CALLOC, SHAPE_MALLOC, SITE_CALLS_OUT, SITE_MAY_CALL_INSIDE, SITE_MAY_TAIL_JUMP,
    SITE_PASSES_BLOCK_ON, SITE_RETURN_SITES_PROBED, SITE_THROWS, SITE_ZERO_FREES, kind, stack_kind,
};
use sampler_ebpf::trials;

use crate::arch::{self, Arguments};
use crate::config::config;
use crate::context::cookie;
use crate::counters::{count_call_without_state, count_record_lost};
use crate::kernel_stack::use_kernel_stack;
use crate::limits;
use crate::live;
use crate::maps::{self, SITES};
use crate::memory::read_user;
use crate::nesting::{is_reentrant, is_tail_jump};
use crate::output;
use crate::pending;
use crate::stack;
use crate::thread::{Pending, SLOTS, TAIL, ThreadState};

/// No allocator can return more (the user half of a 48-bit address space): such a call fails, and is not sampled.
pub const LARGEST_SIZE: u64 = 1 << 47;

/// From this size on, the return is probed even if the call is not sampled.
const LARGE_SIZE: u64 = 1 << 30;

/// A session program's result: do not trap on this call's return.
const SKIP_RETURN: u32 = 1;
/// A session program's result: trap on this call's return.
const PROBE_RETURN: u32 = 0;
/// A decision: the call's result will not be seen, so it must be reported now. The slot number is added to this.
const REPORT_NOW: u32 = 2;

#[inline(always)]
fn session_is_return(ctx: *mut c_void) -> bool {
    // SAFETY: nothing is ever called at this address. The loader replaces the call with a call of the kernel function,
    // which has this signature and only reads the context, or it refuses to load the program.
    let call: extern "C" fn(*mut c_void) -> bool = unsafe { core::mem::transmute(SESSION_IS_RETURN as usize) };
    call(ctx)
}

/// Entry and return in one session link (kernel 6.13 and later): an unsampled call never traps on its return.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe/session")]
pub extern "C" fn allocation_session(ctx: *mut c_void) -> u32 {
    use_kernel_stack(ctx);
    if session_is_return(ctx) {
        outcome(ctx);
        return 0;
    }
    decide(ctx, true)
}

/// The entry probe, for kernels without sessions.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe/entry")]
pub extern "C" fn allocation_entry(ctx: *mut c_void) -> u32 {
    use_kernel_stack(ctx);
    decide(ctx, false);
    0
}

/// The return probe, for kernels without sessions: every call traps here.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uretprobe/return")]
pub extern "C" fn allocation_return(ctx: *mut c_void) -> u32 {
    use_kernel_stack(ctx);
    outcome(ctx);
    0
}

/// The probe at a return site of a function whose return address stays in place: a return instruction, or one that only
/// leads to a return.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe/end")]
pub extern "C" fn allocation_end(ctx: *mut c_void) -> u32 {
    use_kernel_stack(ctx);
    let Some(state) = maps::THREADS.current() else { return 0 };
    if state.pending == 0 {
        return 0;
    }
    let location = ResultLocation::of(cookie(ctx));
    if location.condition != ALWAYS && !arch::holds(ctx, location.condition) {
        return 0;
    }
    let here = arch::stack_pointer(ctx);
    let sp = here.wrapping_add(u64::from(location.words_to_return) * 8);
    let Some(slot) = state.take_pending(sp) else { return 0 };
    let mut registers = arch::registers(ctx);
    if location.words_to_frame_pointer != IN_REGISTER {
        registers.fp = read_user(here.wrapping_add(u64::from(location.words_to_frame_pointer) * 8)).unwrap_or(0);
    }
    registers.ip = state.slots[slot & (SLOTS - 1)].caller;
    registers.sp = sp.wrapping_add(arch::RETURN_SLOT);
    end(ctx, state, slot, arch::register(ctx, location.register), &registers);
    0
}

/// Counts down the call's trials, and decides whether its return is probed.
///
/// Nearly every call is an unsampled malloc or calloc with no other call in flight. Only that case is decided here, in
/// as few instructions as possible: in a program that does other work between two calls, this code is no longer in the
/// caches, and fetching each of its cache lines costs more than running it.
#[inline(always)]
fn decide(ctx: *mut c_void, session: bool) -> u32 {
    let call = cookie(ctx);
    let Some(state) = ThreadState::of_target(call.link_kind(), move || lose(ctx, call)) else { return SKIP_RETURN };
    state.calls += 1;
    let (first, second) = (Arguments::of(ctx).get(0), Arguments::of(ctx).get(1));
    // 0 stands for every call that is not decided here. Requests for 0 bytes are rare.
    let size = match call.shape() {
        SHAPE_MALLOC => first,
        SHAPE_CALLOC if (first | second) < LARGE_SIZE => first * second,
        _ => 0,
    };
    if size.wrapping_sub(1) < LARGE_SIZE - 1
        && state.is_idle()
        && state.count_unsampled(trials::trials(config!(criterion), size, maps::trials_of_class), size)
    {
        return SKIP_RETURN;
    }
    // This way, the stack that a sampled call needs does not add to the stack that the decision needs.
    match decide_any(ctx, state, call, session) {
        PROBE_RETURN => PROBE_RETURN,
        SKIP_RETURN => SKIP_RETURN,
        unseen => {
            report_unseen(ctx, state, call, unseen.wrapping_sub(REPORT_NOW) as usize);
            SKIP_RETURN
        }
    }
}

/// The complete decision, in a separate function so that rarely used code does not lie in the common path. (It is not
/// marked as cold, because that would put it into another section, and the loader's library confuses functions at the
/// same offset of two sections.)
#[inline(never)]
fn decide_any(ctx: *mut c_void, state: &mut ThreadState, call: Cookie, session: bool) -> u32 {
    let arguments = Arguments::of(ctx);
    let sp = arch::stack_pointer(ctx);
    let size = match requested(call, &arguments) {
        Some(size) => size,
        None => {
            if is_reentrant(ctx, state, call, sp) || state.is_nested(ctx, call.index(), sp, 0) {
                state.counters.reentrant += 1;
            } else {
                refuse(state);
            }
            return SKIP_RETURN;
        }
    };
    if is_reentrant(ctx, state, call, sp)
        || state.is_nested(ctx, call.index(), sp, size)
        || is_tail_jump(ctx, state, call, sp, size)
    {
        state.counters.reentrant += 1;
        return SKIP_RETURN;
    }

    let flags = call.flags();
    let old_address = old_block(call, &arguments);
    if old_address != 0 && size == 0 && flags & SITE_ZERO_FREES != 0 {
        state.counters.zero_reallocs += 1;
        live::release(state, old_address);
        return SKIP_RETURN;
    }
    if flags & SITE_MAY_CALL_INSIDE != 0 {
        state.outer_sp = sp;
        state.inner_sp = 0;
        state.outer_site = call.index();
    }
    if flags & SITE_MAY_TAIL_JUMP != 0 && (old_address == 0 || flags & SITE_PASSES_BLOCK_ON != 0) {
        state.pending |= TAIL;
        state.tail_sp = sp;
        state.tail_return = arch::return_address(ctx, sp);
        state.tail_size = size;
        state.tail_site = call.index();
    }
    if !session && state.pending != 0 {
        // Without sessions every return traps, so the return of this call must not be attributed to a call that never
        // returned.
        if let Some(stale) = state.take_pending(sp) {
            state.abandon(stale);
        }
    }
    // The old block is taken out now, because after the call its address may already belong to another thread's block.
    let return_sites_probed = flags & SITE_RETURN_SITES_PROBED != 0;
    let mut old = LiveValue::default();
    let has_old = if config!(live) == 0 || old_address == 0 {
        false
    } else if return_sites_probed {
        // If the call throws, the block stays with its owner. Since a throw is noticed late, the block is not taken out
        // yet.
        live::look(state, old_address, &mut old)
    } else {
        live::take_out(state, old_address, &mut old)
    };

    let trials = trials::trials(config!(criterion), size, maps::trials_of_class);
    let success = state.count_down(trials, size);
    // A request this large is worth a trap: it may well fail, which would distort the exact totals.
    if success.is_none() && !has_old && flags & SITE_CALLS_OUT == 0 && size < LARGE_SIZE {
        return SKIP_RETURN;
    }
    // The return address must not be replaced, and no return site is probed.
    let result_unseen = !return_sites_probed && (flags & SITE_THROWS != 0 || session && state.hides_a_return_address());
    if result_unseen && limits::refuse(size) {
        if success.is_some() {
            state.counters.failed += 1;
        } else {
            state.counters.unsampled_failed += 1;
            state.unsampled_bytes -= size;
        }
        if has_old {
            live::put_back(state, old_address, &old);
        }
        return SKIP_RETURN;
    }
    let slot = state.open_slot(sp) & (SLOTS - 1);
    let (offset, interval) = success.as_ref().map_or((0, 0), |success| (success.offset, success.interval));
    let out_argument = SITES.get(call.index()).map_or(NO_ARGUMENT, |site| site.out_argument);
    // Filled in place: a copy would take a third of the BPF stack.
    let pending = &mut state.slots[slot];
    pending.sp = sp;
    pending.size = size;
    pending.trials = trials;
    pending.offset = offset;
    pending.interval = interval;
    pending.caller = arch::return_address(ctx, sp);
    pending.out = if out_argument == NO_ARGUMENT { 0 } else { arguments.get(out_argument) };
    if has_old {
        pending.old = old;
        pending.old_address = old_address;
    }
    pending.site = call.index();
    pending.sampled = u16::from(success.is_some());
    pending.return_sites_probed = u8::from(return_sites_probed);
    pending.may_throw = u8::from(flags & SITE_THROWS != 0);
    if result_unseen {
        return REPORT_NOW + slot as u32;
    }
    if flags & SITE_CALLS_OUT != 0 {
        state.mark_outer(slot);
    }
    if return_sites_probed { SKIP_RETURN } else { PROBE_RETURN }
}

/// Counts a call by a thread without state. Its old block is freed like any other.
#[inline(always)]
fn lose(ctx: *mut c_void, call: Cookie) {
    let arguments = Arguments::of(ctx);
    let old_address = old_block(call, &arguments);
    if old_address != 0 && call.flags() & SITE_ZERO_FREES != 0 && requested(call, &arguments) == Some(0) {
        return live::release_without_state(old_address);
    }
    count_call_without_state();
    if old_address != 0 {
        live::report_without_state(old_address);
    }
}

/// The block that the call reallocates, or 0.
#[inline(always)]
fn old_block(call: Cookie, arguments: &Arguments) -> u64 {
    if call.old_argument() == NO_ARGUMENT { 0 } else { arguments.get(call.old_argument()) }
}

/// Bytes that the call requests; `None` if no allocator can return that many.
#[inline(always)]
fn requested(call: Cookie, arguments: &Arguments) -> Option<u64> {
    let mut size = arguments.get(call.size_argument());
    if call.times_argument() != NO_ARGUMENT {
        let times = arguments.get(call.times_argument());
        if (size | times) >> 32 != 0 && size != 0 && times > LARGEST_SIZE / size {
            return None;
        }
        size = size.wrapping_mul(times);
    }
    (size <= LARGEST_SIZE).then_some(size)
}

/// Counts a call that must fail because of its size.
#[inline(always)]
fn refuse(state: &mut ThreadState) {
    state.counters.sampled += 1;
    state.counters.failed += 1;
}

/// Reports a call whose result will not be seen, as if it had succeeded. Whether its block is in use remains unknown.
/// The block that it reallocates counts as freed.
#[inline(never)]
fn report_unseen(ctx: *mut c_void, state: &mut ThreadState, call: Cookie, slot: usize) {
    let slot = slot & (SLOTS - 1);
    if call.flags() & SITE_CALLS_OUT != 0 {
        state.mark_outer(slot);
    } else {
        state.pending &= !(1 << slot as u32);
    }
    let pending = state.slot(slot);
    let (old_address, sampled) = (pending.old_address, pending.sampled);
    // If the slot is still read, it stands for a call that has its return address and nothing to report.
    let slot = &mut state.slots[slot];
    slot.return_sites_probed = 1;
    slot.may_throw = 0;
    slot.sampled = 0;
    slot.old_address = 0;
    if old_address != 0 {
        output::submit_free(state, &pending.old);
    }
    if sampled == 0 {
        return;
    }
    let mut registers = arch::registers(ctx);
    registers.ip = pending.caller;
    registers.sp = pending.sp.wrapping_add(arch::RETURN_SLOT);
    state.counters.sampled_bytes += pending.size;
    report(ctx, &registers, state, pending, 0, config!(live) != 0);
}

/// Handles the return of a call, at the address that it returned to.
#[inline(never)]
fn outcome(ctx: *mut c_void) {
    let Some(state) = maps::THREADS.current() else { return };
    if state.pending == 0 {
        return;
    }
    let sp = arch::stack_pointer(ctx).wrapping_sub(arch::RETURN_SLOT);
    let Some(slot) = state.take_pending(sp) else { return };
    end(ctx, state, slot, arch::return_value(ctx), &arch::registers(ctx));
}

/// Reports that the call in a slot has freed the block that it reallocated. (A global function: the verifier checks it
/// once.)
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn free_old(state: *mut ThreadState, slot: u32) -> u32 {
    // SAFETY: the caller passes a reference.
    let Some(state) = (unsafe { state.as_mut() }) else { return 0 };
    let pending = state.slot(slot as usize);
    let mut old = LiveValue::default();
    let taken = pending.return_sites_probed == 0
        || live::look(state, pending.old_address, &mut old)
            && old.sample == pending.old.sample
            && live::take_out(state, pending.old_address, &mut old);
    if taken {
        output::submit_free(state, &pending.old);
    }
    0
}

/// Handles the end of the call that was in `slot`. It returned `returned`, to a caller with these `registers`.
#[inline(always)]
fn end(ctx: *mut c_void, state: &mut ThreadState, slot: usize, returned: u64, registers: &Registers) {
    state.pending &= !TAIL;
    let pending = state.slot(slot);
    let succeeded = if pending.out != 0 { returned == 0 } else { returned != 0 };
    if !succeeded {
        return pending::fail(state, pending);
    }
    if pending.old_address != 0 {
        free_old(state, slot as u32);
    }
    if pending.sampled == 0 {
        return;
    }
    let address = if pending.out == 0 {
        returned
    } else if let Some(address) = read_user::<u64>(pending.out) {
        address
    } else {
        state.counters.lost_result_unreadable += 1;
        state.counters.lost_call_bytes += pending.size;
        state.counters.sampled_bytes += pending.size;
        return;
    };
    state.counters.sampled_bytes += pending.size;
    report(ctx, registers, state, pending, address, config!(live) != 0);
}

/// Reports a sample to the daemon, with the stack that begins at `registers`. With `follow`, adds it to the live map.
/// The address is 0 if unknown. The caller counts the bytes, unless the target does so itself. Returns whether there
/// was space for the record.
#[inline(always)]
pub fn report(
    ctx: *mut c_void,
    registers: &Registers,
    state: &mut ThreadState,
    pending: &Pending,
    address: u64,
    follow: bool,
) -> bool {
    state.sequence = state.sequence.wrapping_add(1);
    let sample = u64::from(state.ordinal) << 32 | u64::from(state.sequence);
    // As everywhere, the record is reserved before the clock is read: every record with a time up to T was reserved by
    // T.
    let Some(record) = output::reserve::<AllocationRecord>() else {
        state.counters.lost_ring_full += 1;
        state.counters.lost_ring_full_bytes += pending.size;
        count_record_lost();
        if follow {
            // The daemon finds it in the live map.
            track(state, pending, sample, output::now(), address);
        }
        return false;
    };
    let time_ns = output::now();
    let stack = stack::take(ctx, registers, state, sample, time_ns);
    if !matches!(stack.kind, stack_kind::FRAME_POINTERS | stack_kind::COPIED) && config!(stack_kind) != stack_kind::NONE
    {
        state.counters.stacks_lost += 1;
    }
    let untracked = follow && !track(state, pending, sample, time_ns, address);
    *record = AllocationRecord {
        kind: kind::ALLOCATION,
        tid: state.tid,
        process: state.process,
        space: state.space,
        sample,
        time_ns,
        address,
        size_bytes: pending.size,
        interval: pending.interval,
        trials: pending.trials,
        offset: pending.offset,
        caller: pending.caller,
        site: pending.site,
        stack_kind: stack.kind,
        stack_id: stack.id,
        untracked: u32::from(untracked),
        thread_name: [0; 16],
    };
    // SAFETY: the helper writes at most the 16 bytes that the field has.
    unsafe { bpf_get_current_comm((&raw mut record.thread_name).cast(), 16) };
    state.counters.submitted += 1;
    // SAFETY: `record` was reserved above, and is not used afterwards.
    unsafe { output::submit(record) };
    true
}

/// Adds a sample to the live map. Returns `false`, and counts it, if the map is full or the address is 0.
#[inline(always)]
fn track(state: &mut ThreadState, pending: &Pending, sample: u64, time_ns: u64, address: u64) -> bool {
    let fits = address != 0 && put_in_live_map(state, pending, sample, time_ns, address) != 0;
    if !fits {
        state.counters.untracked += 1;
        state.counters.untracked_bytes += pending.size;
    }
    fits
}

/// [`track`] for a known address. Returns 1 if the map had space, otherwise 0. (A global function: the verifier checks
/// it once.)
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn put_in_live_map(
    state: *mut ThreadState,
    pending: *const Pending,
    sample: u64,
    time_ns: u64,
    address: u64,
) -> u32 {
    // SAFETY: `track` passes references.
    let (Some(state), Some(pending)) = (unsafe { state.as_mut() }, unsafe { pending.as_ref() }) else { return 0 };
    let value = LiveValue {
        sample,
        time_ns,
        thread_calls: state.moment(),
        size_bytes: pending.size,
        trials: pending.trials,
        interval: pending.interval as u32,
        offset: pending.offset as u32,
        tid: state.tid,
        site: pending.site,
    };
    let mut stale = LiveValue::default();
    if live::take_out(state, address, &mut stale) {
        // The allocator cannot return an address that is in use, so a free was missed.
        state.counters.stale_replaced += 1;
        output::submit_free(state, &stale);
    }
    u32::from(live::put_in(state, address, &value))
}
