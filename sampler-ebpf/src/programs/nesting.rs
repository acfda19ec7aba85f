//! Reentrant calls, which an allocator makes to itself, and calls that end in a jump to another hooked function.

use core::ffi::c_void;

use sampler_ebpf::abi::{Cookie, MAX_REENTRANT_RANGES, SITE_MAY_TAIL_JUMP, Site};

use crate::arch;
use crate::maps::{FILES, SITES};
use crate::pending::{LARGEST_PAGE, SMALLEST_PAGE};
use crate::thread::{TAIL, ThreadState};

/// Whether the allocator called itself: the return address lies in a hooked function of the same file.
///
/// Reading the return address costs more than everything else. It is only read while a call that can call a hooked
/// function is, or may be, in flight; calls made inside that one have a lower stack pointer.
#[inline(always)]
pub fn is_reentrant(ctx: *mut c_void, state: &mut ThreadState, call: Cookie, sp: u64) -> bool {
    if state.outer_sp == 0 {
        return false;
    }
    if sp >= state.outer_sp {
        // At the same stack pointer, this may be the function that the outer call jumped to, which may make calls
        // instead of it.
        if sp > state.outer_sp {
            state.outer_sp = 0;
        }
        return false;
    }
    let (Some(site), Some(outer)) = (SITES.get(call.index()), SITES.get(state.outer_site)) else { return false };
    if outer.file != site.file {
        return false;
    }
    let caller = arch::return_address(ctx, sp);
    // A function that a reentrant call jumps to is part of that call. Another tracer may have hidden the return address
    // in between.
    let reentrant = is_called_inside(ctx, site, caller) || state.inner_sp == sp && is_trampoline(caller);
    if reentrant {
        state.inner_sp = sp;
    } else {
        state.outer_sp = 0;
    }
    reentrant
}

/// Whether the return address lies in the code of hooked functions.
#[inline(always)]
fn is_called_inside(ctx: *mut c_void, site: &Site, caller: u64) -> bool {
    // As a file offset, so that one set of ranges serves every process that maps the file.
    let offset = caller.wrapping_sub(arch::instruction_pointer(ctx)).wrapping_add(site.offset);
    if offset < site.reentrant_start || offset >= site.reentrant_end {
        return false;
    }
    is_in_hooked_code(site.file, offset) != 0
}

/// Whether a file offset lies in the code of hooked functions: 1 or 0. (A global function: the verifier checks it
/// once.)
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn is_in_hooked_code(file: u32, offset: u64) -> u32 {
    let Some(file) = FILES.get(file) else { return 0 };
    let mut i = 0;
    while i < MAX_REENTRANT_RANGES {
        if i as u64 >= file.count {
            break;
        }
        let [start, end] = file.ranges[i];
        if offset >= start && offset < end {
            return 1;
        }
        i += 1;
    }
    0
}

/// Whether the call is a tail jump by an outer call. Such a call has the same stack pointer, the same request (pvalloc
/// rounds it up to whole pages), another function, and the outer call's return address. If the outer call's return is
/// probed, by us or by another tracer, the kernel's trampoline replaces the return address.
#[inline(always)]
pub fn is_tail_jump(ctx: *mut c_void, state: &mut ThreadState, call: Cookie, sp: u64, size: u64) -> bool {
    if state.pending & TAIL == 0 {
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
        state.pending &= !TAIL;
    }
    expected
}

/// Whether the function that was just entered returns to this address, or to the trampoline that hides it.
#[inline(always)]
fn returns_to(ctx: *mut c_void, sp: u64, address: u64) -> bool {
    let found = arch::return_address(ctx, sp);
    found == address || is_trampoline(found)
}

/// Whether an address may be that of the kernel's trampoline. One ordinary return address in thousands is also at the
/// start of a page, so this alone is not sufficient.
#[inline(always)]
const fn is_trampoline(address: u64) -> bool {
    address != 0 && address & (SMALLEST_PAGE - 1) == 0
}
