//! The kernel-side state of each thread: the countdown, exact totals, and calls in flight.

use core::ptr::read_volatile;

use sampler_ebpf::abi::{COUNTERS, Counters, IN_FLIGHT_TAIL, LiveValue, MAX_IN_FLIGHT_CALLS, ProcessKey, link_kind};

/// Maximum number of calls in flight per thread.
pub const SLOTS: usize = MAX_IN_FLIGHT_CALLS;

/// Bit of [`ThreadState::pending`]: a call that may end in a jump to another hooked function is in flight.
pub const TAIL: u32 = IN_FLIGHT_TAIL;

/// Not yet known whether the thread belongs to a target.
pub const NEW: u32 = 0;
/// The thread belongs to a target that is counted by links that serve every process.
pub const TRACKED: u32 = link_kind::SHARED;
/// The thread does not belong to a target.
pub const IGNORED: u32 = 4;
/// The thread belongs to a target that is counted by its own links.
pub const OWN_LINKS: u32 = link_kind::OWN;
/// The thread belongs to a target that announces its samples.
pub const ANNOUNCED: u32 = link_kind::ANNOUNCED;

/// The state of one thread. An unsampled call, or a free of an untracked block, touches only the first 56 bytes. The
/// kernel puts a task's value 8 bytes after the start of a cache line, so these bytes share one cache line.
#[repr(C)]
pub struct ThreadState {
    /// Trials until the next success, at least 1.
    pub remaining: u64,
    /// Number of calls of allocation functions, counted at their entry.
    pub calls: u64,
    /// Number of unsampled calls.
    pub unsampled: u64,
    /// Bytes that they requested.
    pub unsampled_bytes: u64,
    /// Number of frees.
    pub frees_seen: u64,
    /// Stack pointer of the last outermost call that may call a hooked function inside, or 0 if it has returned.
    pub outer_sp: u64,
    /// [`NEW`], [`TRACKED`], [`IGNORED`], [`OWN_LINKS`] or [`ANNOUNCED`].
    pub status: u32,
    /// Bit i is set if `slots[i]` holds a call in flight; [`TAIL`] is set if `tail_sp` belongs to one.
    pub pending: u32,

    /// The owner of the address space that the thread runs in.
    pub space: ProcessKey,
    /// Stack pointer of a call that may end in a jump to another hooked function.
    pub tail_sp: u64,
    /// Return address of this call.
    pub tail_return: u64,
    /// The size that this call requested.
    pub tail_size: u64,
    /// Index of its site.
    pub tail_site: u32,
    /// Index of the site of the call that `outer_sp` belongs to.
    pub outer_site: u32,
    /// Stack pointer of the last call found to be made inside that one.
    pub inner_sp: u64,
    /// The slot to evict next if all are in use.
    pub next_victim: u64,
    /// Generation of the target set when the thread was found not to belong to a target.
    pub generation: u64,
    /// State of the random number generator.
    pub random: u64,
    /// The interval that `remaining` was drawn with; 0 if nothing is sampled.
    pub interval: u64,
    /// Process of the thread.
    pub process: ProcessKey,
    /// The thread's ordinal in this recording, which is the upper half of its sample ids.
    pub ordinal: u32,
    /// Number of samples so far, which is the lower half.
    pub sequence: u32,
    /// Thread id.
    pub tid: u32,
    /// Zero.
    pub reserved: u32,
    /// All counters except those of the unsampled path.
    pub counters: Counters,
    /// Calls in flight whose return, or whose return sites, are probed.
    pub slots: [Pending; SLOTS],
    /// CLOCK_MONOTONIC at the entry of the mapping system call in progress; 0 or `u64::MAX` if there is none.
    pub mapping_ns: u64,
    /// End of the `brk` heap at that time.
    pub mapping_brk: u64,
    /// Number of this thread's calls that inline hooks have counted, as of its last site.
    pub moments: u64,
    /// The sampled call that is reported by an inline hook's site or an announcement.
    pub inline_call: Pending,
}

const _: () = assert!(core::mem::offset_of!(ThreadState, space) == 56);

/// A call in flight.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Pending {
    /// Stack pointer at the function's entry. The return with the same stack pointer is this call's.
    pub sp: u64,
    /// Bytes requested.
    pub size: u64,
    /// Trials that the call took.
    pub trials: u64,
    /// Failed trials before the successful one.
    pub offset: u64,
    /// Interval of the draw.
    pub interval: u64,
    /// Return address.
    pub caller: u64,
    /// Where the result will be stored (posix_memalign), or 0.
    pub out: u64,
    /// Address of the tracked block that a realloc took out of the live map, or 0. If its return sites are probed, the
    /// block is still in the map and is taken out when the call ends.
    pub old_address: u64,
    /// The live map's value for that block.
    pub old: LiveValue,
    /// Index of the site.
    pub site: u32,
    /// 1 if sampled.
    pub sampled: u16,
    /// 1 if the function's return sites are probed: its return address stays on the stack while it runs.
    pub return_sites_probed: u8,
    /// 1 if the function may throw: if its call is abandoned, it has thrown.
    pub may_throw: u8,
}

impl Pending {
    /// A sampled call that has already ended when it is reported, so nothing of it is in flight.
    pub const OVER: Self = {
        // SAFETY: a call consists of integers only, so all zeros is a valid value.
        let nothing: Self = unsafe { core::mem::zeroed() };
        Self { sampled: 1, ..nothing }
    };
}

impl ThreadState {
    /// Returns the call in a slot without a copy, which would take a quarter of the BPF stack.
    #[inline(always)]
    pub fn slot(&self, slot: usize) -> &'static Pending {
        // SAFETY: the state lives as long as its thread, in whose context programs run. A slot changes only where a
        // call begins, and no program reads it after that.
        unsafe { &*(&raw const self.slots[slot & (SLOTS - 1)]) }
    }

    /// Stores the call that is reported by an inline hook's site or an announcement. It has no slot, because it has
    /// ended.
    #[inline(always)]
    pub fn keep_inline_call(&mut self, call: Pending) -> &'static Pending {
        self.inline_call = call;
        self.kept_inline_call()
    }

    /// Returns the call that was stored last.
    #[inline(always)]
    pub fn kept_inline_call(&self) -> &'static Pending {
        // SAFETY: as in `slot`.
        unsafe { &*(&raw const self.inline_call) }
    }

    /// Whether the thread is known to belong to a target.
    #[inline(always)]
    pub fn is_tracked(&self) -> bool {
        self.status == TRACKED || self.status == OWN_LINKS || self.status == ANNOUNCED
    }

    /// Changes with every allocation call of the thread.
    #[inline(always)]
    pub const fn moment(&self) -> u64 {
        self.calls.wrapping_sub(self.counters.inline_sampled).wrapping_add(self.moments)
    }

    /// Whether no call is known to be in flight that the next call could be part of.
    #[inline(always)]
    pub fn is_idle(&self) -> bool {
        self.outer_sp | u64::from(self.pending) == 0
    }

    /// Copies all counters of the thread, which may be running. (A value of this size must not be copied twice: it
    /// takes half of a program's stack.)
    #[inline(always)]
    pub fn copy_counters(&self, to: &mut Counters) {
        let from = (&raw const self.counters).cast::<u64>();
        let mut i = 0;
        while i < COUNTERS {
            // SAFETY: `Counters` consists of `COUNTERS` aligned `u64`s, and `i` is below that.
            to.as_mut_array()[i] = unsafe { read_volatile(from.add(i)) };
            i += 1;
        }
        // SAFETY: the pointers are to fields of the state, which are initialised and aligned.
        unsafe {
            to.unsampled = read_volatile(&raw const self.unsampled);
            to.unsampled_bytes = read_volatile(&raw const self.unsampled_bytes);
            to.frees_seen = read_volatile(&raw const self.frees_seen);
            to.calls = read_volatile(&raw const self.calls);
        }
    }
}
