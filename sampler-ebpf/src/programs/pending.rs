//! Calls in flight whose end is probed: sampled calls, and reallocs of tracked blocks.

use core::ffi::c_void;
use core::sync::atomic::{Ordering, compiler_fence};

use sampler_ebpf::abi::InFlightCall;

use crate::arch;
use crate::live;
use crate::memory::read_user;
use crate::output;
use crate::stack_record::unknown;
use crate::thread::{Pending, SLOTS, ThreadState};

/// Shift of the bits in `ThreadState::pending` that mark calls during which reentrant calls from other files are
/// expected.
const OUTER: u32 = 8;
/// The smallest page size. The trampoline that hides return addresses is at the start of a page.
pub const SMALLEST_PAGE: u64 = 4096;
/// Maximum stack space between the entry of an allocator's function and the calls that it makes, bytes.
const MOST_STACK: u64 = 64 << 10;
/// The largest page size. A request that an allocator passes on may be rounded up to a page.
pub const LARGEST_PAGE: u64 = 64 << 10;

impl Pending {
    /// Whether the kernel's trampoline replaces the call's return address, judging by the stack.
    #[inline(always)]
    fn hides_its_return_address(&self) -> bool {
        self.return_sites_probed == 0 && read_user::<u64>(self.sp).unwrap_or(0) & (SMALLEST_PAGE - 1) == 0
    }

    /// Whether a call at this stack pointer is neither made by this one nor after its return, because it is on another
    /// stack. Fibers have their own stacks, and allocators use far less stack than the distance to them.
    #[inline(always)]
    fn is_on_another_stack(&self, sp: u64) -> bool {
        let is_far = sp.wrapping_sub(self.sp).wrapping_add(MOST_STACK) > 2 * MOST_STACK;
        is_far && (self.return_sites_probed != 0 || self.hides_its_return_address())
    }
}

impl ThreadState {
    /// Frees the slot of the call that was entered at this stack pointer, and returns its index.
    #[inline(always)]
    pub fn take_pending(&mut self, sp: u64) -> Option<usize> {
        let slot = unknown(u64::from(take_call(self, sp))) as usize;
        (slot < SLOTS).then_some(unknown(slot as u64) as usize & (SLOTS - 1))
    }

    /// Marks the call in a slot as one that may get its memory from another allocator.
    #[inline(always)]
    pub fn mark_outer(&mut self, slot: usize) {
        self.pending |= 1 << (slot as u32 + OUTER);
    }

    /// Whether a call with this stack pointer is made by a marked call in flight: the stack has grown since, or the
    /// marked call ended in a jump to this one.
    #[inline(always)]
    pub fn is_nested(&mut self, ctx: *mut c_void, site: u32, sp: u64, size: u64) -> bool {
        self.is_below_outer(sp, |outer| {
            let jumped = if outer.return_sites_probed != 0 {
                site != outer.site
            } else {
                arch::return_address(ctx, sp) != outer.caller
            };
            size.wrapping_sub(outer.size) < LARGEST_PAGE && jumped
        })
    }

    /// Whether a marked call is in flight above this stack pointer, or at it if `counts_at_it` returns true. If the
    /// stack has shrunk past a marked call, that call never returned (longjmp), and it is abandoned.
    #[inline(always)]
    pub fn is_below_outer(&mut self, sp: u64, counts_at_it: impl Fn(&Pending) -> bool) -> bool {
        if self.pending >> OUTER == 0 {
            return false;
        }
        let mut i = 0;
        while i < SLOTS {
            if self.pending & (1 << (i as u32 + OUTER)) != 0 {
                let outer = &self.slots[i];
                if outer.is_on_another_stack(sp) {
                    i += 1;
                    continue;
                }
                // A call whose return sites are probed keeps its return address on the stack. If the address is gone,
                // the call has ended.
                let runs = outer.return_sites_probed == 0 || read_user(outer.sp) == Some(outer.caller);
                if runs && (sp < outer.sp || sp == outer.sp && counts_at_it(outer)) {
                    return true;
                }
                // A call that is further down and has not returned is also on another stack.
                if !outer.hides_its_return_address() {
                    self.pending &= !(1 << i | 1 << (i as u32 + OUTER));
                    self.abandon(i);
                }
            }
            i += 1;
        }
        false
    }

    /// Writes the calls in flight, whose return addresses are hidden from the stack, into a record. The verifier does
    /// not track the contents of a record's memory.
    #[inline(always)]
    pub fn write_in_flight_calls(&self, to: *mut InFlightCall) {
        let mut i = 0;
        while i < SLOTS {
            let (mut sp, mut caller) = (0, 0);
            if self.pending & (1 << i) != 0 {
                (sp, caller) = (self.slots[i].sp, self.slots[i].caller);
            }
            // SAFETY: the caller passes space for `SLOTS` calls.
            unsafe { to.add(i).write(InFlightCall { sp, caller }) };
            i += 1;
        }
    }

    /// Whether a call that was entered at this stack pointer is in flight.
    #[inline(always)]
    pub fn is_pending(&self, sp: u64) -> bool {
        let mut i = 0;
        while i < SLOTS {
            if self.pending & (1 << i) != 0 && self.slots[i].sp == sp {
                return true;
            }
            i += 1;
        }
        false
    }

    /// Whether the return address of a marked call in flight is hidden. Such a call may run code that switches stacks.
    ///
    /// The kernel drops a call when another one begins or ends whose stack pointer suggests that the first has
    /// returned. If the program has switched stacks, that is wrong, and the first call's return kills the program. So
    /// in this state no other return address may be replaced. Calls that are not marked never switch stacks: a call
    /// made while one is in flight is in a signal handler, and returns first.
    #[inline(never)]
    pub fn hides_a_return_address(&self) -> bool {
        let mut i = 0;
        while i < SLOTS {
            if self.pending & (1 << (i as u32 + OUTER)) != 0 && self.slots[i].hides_its_return_address() {
                return true;
            }
            i += 1;
        }
        false
    }

    /// Opens a slot for a new call at this stack pointer. Evicts a call that never returned (longjmp, an exception) if
    /// needed.
    #[inline(always)]
    pub fn open_slot(&mut self, sp: u64) -> usize {
        unknown(u64::from(open_call(self, sp))) as usize & (SLOTS - 1)
    }

    #[inline(always)]
    fn find_slot(&mut self, sp: u64) -> usize {
        if let Some(stale) = self.take_pending(sp) {
            self.abandon(stale);
        }
        let mut i = 0;
        while i < SLOTS {
            if self.pending & (1 << i) == 0 {
                self.has_no_block(i);
                self.pending |= 1 << i;
                return i;
            }
            i += 1;
        }
        let victim = self.victim() & (SLOTS - 1);
        self.pending &= !(1 << (victim as u32 + OUTER));
        self.abandon(victim);
        self.has_no_block(victim);
        victim
    }

    /// Clears a slot's old block before another call uses the slot, so that a concurrent reader does not find the block
    /// that the previous call reallocated.
    #[inline(always)]
    fn has_no_block(&mut self, slot: usize) {
        let old_address = &raw mut self.slots[slot].old_address;
        // SAFETY: the pointer is to a field of the state.
        unsafe { old_address.write_volatile(0) };
        compiler_fence(Ordering::Release);
    }

    /// Returns the slot to evict: one with nothing to report if there is one, and never the one that the kernel still
    /// tracks.
    #[inline(never)]
    fn victim(&mut self) -> usize {
        let mut i = 0;
        while i < SLOTS {
            if self.slots[i].sampled == 0 && !self.slots[i].hides_its_return_address() {
                return i;
            }
            i += 1;
        }
        self.next_victim = self.next_victim.wrapping_add(1);
        let next = self.next_victim as usize & (SLOTS - 1);
        if self.slots[next].hides_its_return_address() { next + 1 } else { next }
    }

    /// Abandons the call in a slot, and counts what is lost with it.
    #[inline(always)]
    pub fn abandon(&mut self, slot: usize) {
        abandon_call(self, slot as u32);
    }

    #[inline(always)]
    fn abandon_slot(&mut self, slot: usize) {
        let pending = self.slot(slot);
        if pending.return_sites_probed != 0 && pending.may_throw != 0 {
            // It threw an exception.
            fail(self, pending);
            return;
        }
        if pending.sampled != 0 {
            self.counters.lost_abandoned += 1;
            self.counters.lost_call_bytes += pending.size;
            self.counters.sampled_bytes += pending.size;
        }
        if pending.old_address != 0 && pending.return_sites_probed == 0 {
            // It is unknown whether the old block was freed. A realloc that was left in the middle has most likely
            // freed it.
            output::submit_free(self, &pending.old);
        }
    }

    /// Abandons all calls in flight, because the thread exits or its program is replaced.
    #[inline(always)]
    pub fn abandon_all(&mut self) {
        let mut i = 0;
        while i < SLOTS {
            if self.pending & (1 << i) != 0 {
                self.abandon(i);
            }
            i += 1;
        }
        self.pending = 0;
    }
}

// Global functions: the verifier checks each of them once, separately and for any arguments, instead of once for each
// state in which it is called.

/// Implements [`ThreadState::take_pending`]; `SLOTS` if there is no such call.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn take_call(state: *mut ThreadState, sp: u64) -> u32 {
    // SAFETY: the caller passes a reference, also in the functions below.
    let Some(state) = (unsafe { state.as_mut() }) else { return SLOTS as u32 };
    let mut i = 0;
    while i < SLOTS {
        if state.pending & (1 << i) != 0 && state.slots[i].sp == sp {
            state.pending &= !(1 << i | 1 << (i as u32 + OUTER));
            return i as u32;
        }
        i += 1;
    }
    SLOTS as u32
}

/// Implements [`ThreadState::open_slot`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn open_call(state: *mut ThreadState, sp: u64) -> u32 {
    // SAFETY: as above.
    unsafe { state.as_mut() }.map_or(0, |state| state.find_slot(sp) as u32)
}

/// Implements [`ThreadState::abandon`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn abandon_call(state: *mut ThreadState, slot: u32) -> u32 {
    // SAFETY: as above.
    if let Some(state) = unsafe { state.as_mut() } {
        state.abandon_slot(slot as usize);
    }
    0
}

/// Undoes a call that returned no block, and puts back the block that it was to reallocate.
#[inline(always)]
pub fn fail(state: &mut ThreadState, pending: &Pending) {
    if pending.old_address != 0 && pending.return_sites_probed == 0 {
        live::put_back(state, pending.old_address, &pending.old);
    }
    if pending.sampled != 0 {
        state.counters.failed += 1;
    } else {
        state.counters.unsampled_failed += 1;
        state.unsampled_bytes -= pending.size;
    }
}
