//! Calls in progress whose return is awaited: sampled ones, and reallocs of tracked blocks.

use core::ffi::c_void;

use sampler_ebpf::abi::{AWAITED_CALLS, AwaitedReturn, LiveValue};

use crate::arch;
use crate::free;
use crate::maps::read_user;
use crate::output;
use crate::state::ThreadState;

/// Most calls in progress per thread.
pub const SLOTS: usize = AWAITED_CALLS;

/// Shift of the bits in `ThreadState::pending` that mark calls during which inner calls of other files are expected.
const OUTER: u32 = 8;
/// No page is larger: a request that is passed on may be rounded up to one.
pub const LARGEST_PAGE: u64 = 64 << 10;

/// A call in progress.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Pending {
    /// Stack pointer at the function's entry: its return is the one with this stack pointer.
    pub sp: u64,
    /// Bytes requested.
    pub size: u64,
    /// Trials it took.
    pub trials: u64,
    /// Failed trials before the successful one.
    pub offset: u64,
    /// Interval of the draw.
    pub interval: u64,
    /// Return address.
    pub caller: u64,
    /// Where the result will be (posix_memalign), or 0.
    pub out: u64,
    /// Address of the tracked block that a realloc took out of the live map (or, if its ends are probed, will take out), or 0.
    pub old_address: u64,
    /// Its value.
    pub old: LiveValue,
    /// Index of the site.
    pub site: u32,
    /// 1 if sampled.
    pub sampled: u16,
    /// 1 if the function's own return instructions are probed: the return address is on the stack while it runs.
    pub ends_probed: u16,
}

impl ThreadState {
    /// The slot of the call entered at that stack pointer, now free.
    #[inline(always)]
    pub fn take_pending(&mut self, sp: u64) -> Option<usize> {
        let mut i = 0;
        while i < SLOTS {
            if self.pending & (1 << i) != 0 && self.slots[i].sp == sp {
                self.pending &= !(1 << i | 1 << (i as u32 + OUTER));
                return Some(i);
            }
            i += 1;
        }
        None
    }

    /// Marks the call in a slot as one that may allocate elsewhere for itself.
    #[inline(always)]
    pub fn mark_outer(&mut self, slot: usize) {
        self.pending |= 1 << (slot as u32 + OUTER);
    }

    /// Whether a call with that stack pointer is made for a marked call in progress: the stack grew since, or the marked
    /// call ended in a jump here.
    #[inline(always)]
    pub fn is_nested(&mut self, ctx: *mut c_void, site: u32, sp: u64, size: u64) -> bool {
        self.is_below_outer(sp, |outer| {
            let jumped =
                if outer.ends_probed != 0 { site != outer.site } else { arch::return_address(ctx, sp) != outer.caller };
            size.wrapping_sub(outer.size) < LARGEST_PAGE && jumped
        })
    }

    /// Whether a marked call is in progress above that stack pointer, or at it, if that counts. A marked call that the
    /// stack has shrunk past never returned (longjmp): it is forgotten.
    #[inline(always)]
    pub fn is_below_outer(&mut self, sp: u64, counts_at_it: impl Fn(&Pending) -> bool) -> bool {
        if self.pending >> OUTER == 0 {
            return false;
        }
        let mut i = 0;
        while i < SLOTS {
            if self.pending & (1 << (i as u32 + OUTER)) != 0 {
                let outer = &self.slots[i];
                // Nothing hides the return address of one whose ends are probed: if it is gone, so is the call.
                let runs = outer.ends_probed == 0 || read_user(outer.sp) == Some(outer.caller);
                if runs && (sp < outer.sp || sp == outer.sp && counts_at_it(outer)) {
                    return true;
                }
                self.pending &= !(1 << i | 1 << (i as u32 + OUTER));
                self.abandon(i);
            }
            i += 1;
        }
        false
    }

    /// Return addresses that the calls in progress have hidden from the stack.
    #[inline(always)]
    pub fn awaited(&self) -> [AwaitedReturn; AWAITED_CALLS] {
        let mut awaited = [AwaitedReturn { sp: 0, caller: 0 }; AWAITED_CALLS];
        if self.pending != 0 {
            let mut i = 0;
            while i < SLOTS {
                if self.pending & (1 << i) != 0 {
                    awaited[i] = AwaitedReturn { sp: self.slots[i].sp, caller: self.slots[i].caller };
                }
                i += 1;
            }
        }
        awaited
    }

    /// Whether a call entered at that stack pointer is in progress.
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

    /// A slot for a new call at that stack pointer. A call that never returned (longjmp, an exception) gives way.
    #[inline(always)]
    pub fn open_slot(&mut self, sp: u64) -> usize {
        if let Some(stale) = self.take_pending(sp) {
            self.abandon(stale);
        }
        let mut i = 0;
        while i < SLOTS {
            if self.pending & (1 << i) == 0 {
                self.pending |= 1 << i;
                return i;
            }
            i += 1;
        }
        let victim = (self.next_victim as usize) & (SLOTS - 1);
        self.next_victim += 1;
        self.pending &= !(1 << (victim as u32 + OUTER));
        self.abandon(victim);
        victim
    }

    /// Forgets the call in a slot, and counts what that loses.
    #[inline(always)]
    pub fn abandon(&mut self, slot: usize) {
        let pending = self.slots[slot & (SLOTS - 1)];
        if pending.ends_probed != 0 {
            // It threw.
            fail(self, &pending);
            return;
        }
        if pending.sampled != 0 {
            self.counters.lost_abandoned += 1;
            self.counters.lost_call_bytes += pending.size;
            self.counters.sampled_bytes += pending.size;
        }
        if pending.old_address != 0 {
            // Whether the old block was freed is unknown; a realloc that was left half-way most likely did.
            output::submit_free(self, &pending.old);
        }
    }

    /// Abandons all calls in progress (the thread ends, or its program is replaced).
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

/// Takes a call back that gave nothing, and puts back the block that it was to reallocate.
#[inline(always)]
pub fn fail(state: &mut ThreadState, pending: &Pending) {
    if pending.old_address != 0 && pending.ends_probed == 0 {
        free::put_back(state, pending.old_address, &pending.old);
    }
    if pending.sampled != 0 {
        state.counters.failed += 1;
    } else {
        state.counters.unsampled_failed += 1;
        state.unsampled_bytes -= pending.size;
    }
}
