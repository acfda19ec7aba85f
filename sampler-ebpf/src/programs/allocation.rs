//! Allocation functions: the decision at the entry, the outcome at the return.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::{bpf_get_attach_cookie, bpf_get_current_comm};
use sampler_ebpf::abi::{
    AllocationRecord, Cookie, LiveValue, MAX_INNER_RANGES, NO_ARGUMENT, Registers, SHAPE_CALLOC, SHAPE_MALLOC,
    SITE_CALLS_OUT, SITE_ENDS_PROBED, SITE_MAY_CALL_INSIDE, SITE_MAY_TAIL_JUMP, SITE_PASSES_BLOCK_ON, SITE_THROWS,
    SITE_ZERO_FREES, Site, kind, stack_kind,
};
use sampler_ebpf::trials;

use crate::arch::{self, Arguments};
use crate::config::config;
use crate::free;
use crate::limits;
use crate::maps::{self, FILES, SITES, read_user};
use crate::output;
use crate::pending::{self, LARGEST_PAGE, Pending, SLOTS};
use crate::stack;
use crate::stage;
use crate::state::ThreadState;

/// No allocator can give more (the user half of a 48-bit address space): such a call fails, and is not sampled.
const LARGEST_SIZE: u64 = 1 << 47;

/// From here on the result is awaited, sampled or not.
const LARGE_SIZE: u64 = 1 << 30;

/// A session's answer: do not trap on this call's return.
const SKIP_RETURN: u32 = 1;
/// Trap on it.
const AWAIT_RETURN: u32 = 0;

/// Placeholder of the kernel function `bpf_session_is_return`; the loader puts its BTF id into the call.
const SESSION_IS_RETURN: usize = 0x7f01;

#[inline(always)]
fn session_is_return(ctx: *mut c_void) -> bool {
    // SAFETY: the loader replaces this call by one of the kernel function, which takes nothing it could break.
    let call: extern "C" fn(*mut c_void) -> bool = unsafe { core::mem::transmute(SESSION_IS_RETURN) };
    call(ctx)
}

/// Entry and return under one session link (kernel 6.13 and later): an unsampled call never traps on its return.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe/session")]
pub extern "C" fn allocation_session(ctx: *mut c_void) -> u32 {
    if session_is_return(ctx) {
        outcome(ctx);
        return 0;
    }
    decide(ctx, true)
}

/// Entry, for kernels without sessions.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe/entry")]
pub extern "C" fn allocation_entry(ctx: *mut c_void) -> u32 {
    decide(ctx, false);
    0
}

/// Return, for kernels without sessions: every call traps here.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uretprobe/return")]
pub extern "C" fn allocation_return(ctx: *mut c_void) -> u32 {
    outcome(ctx);
    0
}

/// A return instruction of a function that may throw.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe/end")]
pub extern "C" fn allocation_end(ctx: *mut c_void) -> u32 {
    end(ctx, arch::stack_pointer(ctx), true);
    0
}

/// The cookie of the link that a program runs for.
#[inline(always)]
pub fn cookie(ctx: *mut c_void) -> Cookie {
    // SAFETY: a helper call.
    Cookie(unsafe { bpf_get_attach_cookie(ctx) })
}

/// Counts the call down and answers whether its return is awaited.
///
/// Nearly every call is unsampled, of malloc or calloc, and made while nothing else is in progress. That much is decided
/// here, in the fewest instructions: between two calls of a program that does other work the caches have forgotten this
/// code, and each of its lines costs more than what it does.
#[inline(always)]
fn decide(ctx: *mut c_void, session: bool) -> u32 {
    let call = cookie(ctx);
    if const { stage::is_last("allocation-cookie") } {
        return SKIP_RETURN;
    }
    let Some(state) = ThreadState::of_target() else { return SKIP_RETURN };
    if const { stage::is_last("allocation-state") } {
        return SKIP_RETURN;
    }
    let (first, second) = (Arguments::of(ctx).get(0), Arguments::of(ctx).get(1));
    // A size of 0 is none that is common, and stands for all that is not decided here.
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
    decide_any(ctx, state, call, session)
}

/// The whole decision. Apart, so that what is rarely needed does not lie between what is. (Not marked as cold: that would
/// put it into a section of its own, and the loader's library takes functions at the same place of two sections for one.)
#[inline(never)]
fn decide_any(ctx: *mut c_void, state: &mut ThreadState, call: Cookie, session: bool) -> u32 {
    let arguments = Arguments::of(ctx);
    let sp = arch::stack_pointer(ctx);
    let size = match requested(call, &arguments) {
        Some(size) => size,
        None => {
            if !is_inner(ctx, state, call, sp) && !state.is_nested(ctx, call.index(), sp, 0) {
                refuse(state);
            }
            return SKIP_RETURN;
        }
    };
    if is_inner(ctx, state, call, sp)
        || state.is_nested(ctx, call.index(), sp, size)
        || is_tail_jump(ctx, state, call, sp, size)
    {
        state.counters.inner += 1;
        return SKIP_RETURN;
    }

    let flags = call.flags();
    let old_address = if call.old_argument() == NO_ARGUMENT { 0 } else { arguments.get(call.old_argument()) };
    if old_address != 0 && size == 0 && flags & SITE_ZERO_FREES != 0 {
        free::release(state, old_address);
        return SKIP_RETURN;
    }
    if flags & SITE_MAY_CALL_INSIDE != 0 {
        state.outer_sp = sp;
        state.outer_site = call.index();
    }
    if flags & SITE_MAY_TAIL_JUMP != 0 && (old_address == 0 || flags & SITE_PASSES_BLOCK_ON != 0) {
        state.tail_sp = sp;
        state.tail_return = arch::return_address(ctx, sp);
        state.tail_size = size;
        state.tail_site = call.index();
    }
    if !session && state.pending != 0 {
        // Without sessions every return traps, so a call that never returned must not be taken for this one.
        if let Some(stale) = state.take_pending(sp) {
            state.abandon(stale);
        }
    }
    // The old block is taken out now: after the call another thread may already have been given its address.
    let ends_probed = flags & SITE_ENDS_PROBED != 0;
    let old = if config!(live) == 0 || old_address == 0 {
        None
    } else if ends_probed {
        // If it throws, which is noticed late, the block is whoever's it was.
        free::look(state, old_address)
    } else {
        free::take_out(state, old_address)
    };

    let trials = trials::trials(config!(criterion), size, maps::trials_of_class);
    let success = state.count_down(trials, size);
    // One that asks for so much is worth a trap: it may well fail, and would distort the exact totals.
    if success.is_none() && old.is_none() && flags & SITE_CALLS_OUT == 0 && size < LARGE_SIZE {
        return SKIP_RETURN;
    }
    if flags & SITE_THROWS != 0 && limits::refuse(size) {
        // Its return must not be awaited, and it is the end of the call for us.
        if success.is_some() {
            state.counters.failed += 1;
        } else {
            state.counters.unsampled_failed += 1;
            state.unsampled_bytes -= size;
        }
        if let Some(old) = old {
            free::put_back(state, old_address, &old);
        }
        return SKIP_RETURN;
    }
    let slot = state.open_slot(sp) & (SLOTS - 1);
    let (offset, interval) = success.as_ref().map_or((0, 0), |success| (success.offset, success.interval));
    let out_argument = SITES.get(call.index()).map_or(NO_ARGUMENT, |site| site.out_argument);
    let pending = Pending {
        sp,
        size,
        trials,
        offset,
        interval,
        caller: arch::return_address(ctx, sp),
        out: if out_argument == NO_ARGUMENT { 0 } else { arguments.get(out_argument) },
        old_address: if old.is_some() { old_address } else { 0 },
        old: old.unwrap_or_default(),
        site: call.index(),
        sampled: u16::from(success.is_some()),
        ends_probed: u16::from(ends_probed),
    };
    state.slots[slot] = pending;
    if flags & SITE_CALLS_OUT != 0 {
        state.mark_outer(slot);
    }
    if ends_probed { SKIP_RETURN } else { AWAIT_RETURN }
}

/// Bytes that the call asks for; `None` if no allocator can give them.
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

/// Counts a call that must fail.
#[inline(always)]
fn refuse(state: &mut ThreadState) {
    state.counters.sampled += 1;
    state.counters.failed += 1;
}

/// Whether the allocator called itself: the return address lies in a hooked function of the same file.
///
/// Reading the return address costs more than all the rest, so it is read only while a call is, or may be, in progress
/// that can do such a thing: what it calls has its stack pointer below.
#[inline(always)]
fn is_inner(ctx: *mut c_void, state: &mut ThreadState, call: Cookie, sp: u64) -> bool {
    if state.outer_sp == 0 {
        return false;
    }
    if sp >= state.outer_sp {
        // At the same place it may be what the outer call jumped to, which may call in its stead.
        if sp > state.outer_sp {
            state.outer_sp = 0;
        }
        return false;
    }
    let (Some(site), Some(outer)) = (SITES.get(call.index()), SITES.get(state.outer_site)) else { return false };
    if outer.file != site.file {
        return false;
    }
    let inner = is_called_inside(ctx, site, arch::return_address(ctx, sp));
    if !inner {
        state.outer_sp = 0;
    }
    inner
}

/// Whether the return address lies in the code of hooked functions.
#[inline(always)]
fn is_called_inside(ctx: *mut c_void, site: &Site, caller: u64) -> bool {
    // As file offset, so that one set of ranges serves every process that maps the file.
    let offset = caller.wrapping_sub(arch::instruction_pointer(ctx)).wrapping_add(site.offset);
    if offset < site.inner_start || offset >= site.inner_end {
        return false;
    }
    let Some(file) = FILES.get(site.file) else { return false };
    let mut i = 0;
    while i < MAX_INNER_RANGES {
        if i as u64 >= file.count {
            break;
        }
        let [start, end] = file.ranges[i];
        if offset >= start && offset < end {
            return true;
        }
        i += 1;
    }
    false
}

/// Whether the call is the end of an outer one that jumped here: same stack pointer, same request (pvalloc rounds it up
/// to whole pages), another function, and the return address of the outer call, or the kernel's trampoline in its place
/// while its return is awaited: by us, or by somebody else's probe.
#[inline(always)]
fn is_tail_jump(ctx: *mut c_void, state: &mut ThreadState, call: Cookie, sp: u64, size: u64) -> bool {
    if state.tail_sp == 0 {
        return false;
    }
    let expected = state.tail_sp == sp
        && size.wrapping_sub(state.tail_size) < LARGEST_PAGE
        && state.tail_site != call.index()
        && (state.is_pending(sp) || returns_to(ctx, sp, state.tail_return));
    if expected && call.flags() & SITE_MAY_TAIL_JUMP != 0 {
        // reallocarray jumps to realloc, which may jump to malloc.
        state.tail_site = call.index();
    } else {
        state.tail_sp = 0;
    }
    expected
}

/// Whether the function that was just entered returns to an address, or to the trampoline that hides it.
#[inline(always)]
fn returns_to(ctx: *mut c_void, sp: u64, address: u64) -> bool {
    /// The trampoline is at the start of a page. Of calls, one in thousands ends where a page does, and that one alone
    /// would not do.
    const SMALLEST_PAGE: u64 = 4096;
    let found = arch::return_address(ctx, sp);
    found == address || (found != 0 && found & (SMALLEST_PAGE - 1) == 0)
}

/// The return of a call, seen where it returned to.
#[inline(never)]
fn outcome(ctx: *mut c_void) {
    end(ctx, arch::stack_pointer(ctx).wrapping_sub(arch::RETURN_SLOT), false);
}

/// The end of a call that was entered at stack pointer `sp`; `before`: it is about to return.
#[inline(always)]
fn end(ctx: *mut c_void, sp: u64, before: bool) {
    let Some(state) = maps::THREADS.current() else { return };
    if state.pending == 0 {
        return;
    }
    let Some(slot) = state.take_pending(sp) else { return };
    state.tail_sp = 0;
    let pending = state.slots[slot & (SLOTS - 1)];
    let returned = arch::return_value(ctx);
    let succeeded = if pending.out != 0 { returned == 0 } else { returned != 0 };
    if !succeeded {
        return pending::fail(state, &pending);
    }
    if pending.old_address != 0 {
        let taken = pending.ends_probed == 0
            || free::look(state, pending.old_address).is_some_and(|old| old.sample == pending.old.sample)
                && free::take_out(state, pending.old_address).is_some();
        if taken {
            output::submit_free(state, &pending.old);
        }
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
    let mut registers = arch::registers(ctx);
    if before {
        registers.ip = pending.caller;
        registers.sp = sp.wrapping_add(arch::RETURN_SLOT);
    }
    report(ctx, &registers, state, &pending, address, config!(live) != 0);
}

/// Tells the daemon of a sample, with the stack that begins at `registers`. `follow`: puts it into the live map.
#[inline(always)]
pub fn report(
    ctx: *mut c_void,
    registers: &Registers,
    state: &mut ThreadState,
    pending: &Pending,
    address: u64,
    follow: bool,
) {
    state.counters.sampled_bytes += pending.size;
    state.sequence = state.sequence.wrapping_add(1);
    let sample = u64::from(state.ordinal) << 32 | u64::from(state.sequence);
    // Reserved before the time is read, as everywhere: what has a time up to T was reserved by T.
    let Some(record) = output::reserve::<AllocationRecord>(maps::events()) else {
        state.counters.lost_ring_full += 1;
        state.counters.lost_ring_full_bytes += pending.size;
        output::count_record_lost();
        if follow {
            // The daemon finds it in the live map.
            track(state, pending, sample, output::now(), address);
        }
        return;
    };
    let time_ns = output::now();
    let stack = stack::take(ctx, registers, state, sample, time_ns);
    if stack.kind == stack_kind::NONE && config!(stack_kind) != stack_kind::NONE {
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
    // SAFETY: the helper writes at most 16 bytes.
    unsafe { bpf_get_current_comm((&raw mut record.thread_name).cast(), 16) };
    state.counters.submitted += 1;
    output::submit(record, maps::events(), config!(events_mark));
}

/// Remembers a live sample; `false`, counted, if the map is full. Apart, as it is needed in two places.
#[inline(never)]
fn track(state: &mut ThreadState, pending: &Pending, sample: u64, time_ns: u64, address: u64) -> bool {
    let value = LiveValue {
        sample,
        time_ns,
        thread_calls: state.calls(),
        size_bytes: pending.size,
        trials: pending.trials,
        interval: pending.interval as u32,
        offset: pending.offset as u32,
        tid: state.tid,
        site: pending.site,
    };
    if let Some(stale) = free::take_out(state, address) {
        // The allocator cannot give an address twice, so a free was missed.
        state.counters.stale_replaced += 1;
        output::submit_free(state, &stale);
    }
    let fits = free::put_in(state, address, &value);
    if !fits {
        state.counters.untracked += 1;
        state.counters.untracked_bytes += pending.size;
    }
    fits
}
