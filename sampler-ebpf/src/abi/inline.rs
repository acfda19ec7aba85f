//! What inline hooks tell the BPF programs: the probe sites in the code that is mapped into a target, and the registers
//! there (x86-64).
//!
//! Each site is a one-byte no-op, aligned to eight bytes, with a symbol of its own in the mapped file (`SYMBOL_*`). (Linux
//! 6.18 makes a probed five-byte one a call into a page that a forked child does not inherit: the child ends there.) The
//! stack pointer is as at the hooked function's entry: the word there is the return address, and nothing can live below.
//! Callee-saved registers are the caller's. So the first frame is the caller itself. A thread passes a site only for a
//! sampled call, or for a sampled block; a probe there that does nothing changes nothing.
//!
//! | register | [`SYMBOL_RESULT`] | [`SYMBOL_FREEING`], [`SYMBOL_REALLOCATING`] | [`SYMBOL_UNSEEN`] |
//! |---|---|---|---|
//! | `rax` | the function's result | the thread's calls so far | offset, and interval in the upper half |
//! | `rdi` | the block, or 0 | the function's argument | the function's argument |
//! | `rsi` | bytes requested | the function's argument | the function's argument |
//! | `rdx` | the thread's calls so far | the function's argument | the function's argument |
//! | `rcx` | offset | the function's argument | the function's argument |
//! | `r8` | interval R of the draw | the function's argument | the function's argument |
//! | `r9` | the old block, or 0 | the function's argument | the function's argument |
//! | `r10` | function, index, flags | function, index, flags | function, index, flags |
//! | `r11` | 0, or 1 if the function goes on | the block | bytes requested |
//!
//! Bits 0 to 15 of `r10` are [`Site::function`](super::Site::function)'s number as the daemon gave it, 16 to 31 the
//! function's index among those of this blob, and 32 to 63 flags; *offset* is the number of failed trials of this
//! allocation before the successful one. *The thread's calls* counts this call.
//!
//! The order of events of one thread is the order of its sites:
//! - malloc and its kin: RESULT with [`flag::SAMPLED`] if the call succeeded; nothing if it failed.
//! - free of a sampled block: FREEING, before the block is freed. The block is no longer known afterwards.
//! - realloc of a sampled block: REALLOCATING before the call, then RESULT with that block in `r9` in any case: with
//!   [`flag::FAILED`], the old block is still in use and stays known; without it, it was freed. [`flag::SAMPLED`] says
//!   whether the new block is a sample too. Between both, other threads may get the old block's address, so it must have
//!   left the live map at REALLOCATING. If the call never returns (`longjmp`), RESULT does not come.
//!   If a function that may throw failed in its twin's stead, RESULT with [`flag::FAILED`] comes before the function
//!   itself runs: `rdi` to `r8` are then its arguments.
//! - realloc of another block: RESULT as for malloc, with `r9` = 0.
//! - a function that may throw, whose result cannot be awaited: UNSEEN before the call; the block is not known. Offset
//!   and interval have 32 bits there.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::ProcessKey;

/// Symbol of the site behind an allocation function's call: the outcome is known.
pub const SYMBOL_RESULT: &str = "heapbpf_result";
/// Symbol of the site before a sampled block is freed.
pub const SYMBOL_FREEING: &str = "heapbpf_freeing";
/// Symbol of the site before a sampled block is reallocated.
pub const SYMBOL_REALLOCATING: &str = "heapbpf_reallocating";
/// Symbol of the site before a sampled call whose result will not be seen.
pub const SYMBOL_UNSEEN: &str = "heapbpf_unseen";

/// Bits in the upper half of `r10`.
pub mod flag {
    /// The block is a sample.
    pub const SAMPLED: u32 = 1;
    /// The call failed. Only with an old block.
    pub const FAILED: u32 = 2;
    /// More threads than there are slots: the thread's number of calls is not known.
    pub const SHARED_SLOT: u32 = 4;
    /// The block could not be noted (its set is full), so its free will not be seen.
    pub const UNTRACKED: u32 = 8;
}

/// How a function that may throw is called through another one, its twin, which returns NULL instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TwinArguments {
    /// With the same arguments.
    Same,
    /// With the first two in the other order.
    Swapped,
    /// With a reference in addition, which it does not use, as this argument (from 0): `std::nothrow`.
    WithReference(u8),
}

/// Bits to shift `r10` to the right for its flags, and `rax` for the interval.
pub const UPPER_HALF: u32 = 32;
/// Bits of `r10` with the function's number.
pub const NUMBER_BITS: u32 = 16;
/// Bits of a cookie, beside the first site's index: what is done where it is linked. None of them: the outcome of a call is known.
pub const SITE_KINDS: u64 = UNSEEN_SITE | FREEING_SITE | REALLOCATING_SITE;
/// A sampled call is made whose result will not be seen.
pub const UNSEEN_SITE: u64 = 1 << 63;
/// A sampled block is freed.
pub const FREEING_SITE: u64 = 1 << 62;
/// A sampled block is reallocated.
pub const REALLOCATING_SITE: u64 = 1 << 61;

/// Where the target's own counts are, from the base of what is mapped into it. `heapbpf_inline::abi` has the whole layout.
pub mod memory {
    /// Offset of the control page, whose first word is [`MAGIC`].
    pub const CONTROL: u64 = 0x1_5000;
    /// The first word of the control page.
    pub const MAGIC: u64 = u64::from_le_bytes(*b"HEAPBPFi");
    /// Offset of the number of threads that have begun.
    pub const THREADS: u64 = 0x1_6000;
    /// Offset of the slot of all threads without one of their own.
    pub const SHARED_SLOT: u64 = 0x1_6080;
    /// Offset of the threads' slots.
    pub const SLOTS: u64 = 0x1_7000;
    /// Number of these.
    pub const SLOT_COUNT: u64 = 1024;
    /// Bytes from one to the next.
    pub const SLOT_BYTES: u64 = 128;
    /// Slots in a page of memory.
    pub const SLOTS_OF_PAGE: u64 = 32;
    /// A thread's slot is the one at these bits of its thread pointer times this number, shifted by [`HASH_SHIFT`], or one of the
    /// next; [`TRIES`] in all.
    pub const HASH: u64 = 0x1e37_79b1;
    /// See [`HASH`].
    pub const HASH_SHIFT: u32 = 25;
    /// See [`HASH`].
    pub const TRIES: u64 = 32;
}

/// The words of a slot that are added up.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SlotSums {
    /// A slot's thread pointer; in sums, the number of threads that have begun.
    pub threads: u64,
    /// Without meaning in sums.
    pub countdown: u64,
    /// Outermost calls of allocation functions, failed ones included.
    pub calls: u64,
    /// Bytes that they requested, less those that are known to have failed.
    pub bytes: u64,
    /// Sampled calls.
    pub sampled: u64,
    /// Sampled calls that succeeded and passed a site.
    pub reported: u64,
    /// Sampled calls that failed.
    pub failed: u64,
    /// Unsampled calls that are known to have failed.
    pub unsampled_failed: u64,
    /// Without meaning in sums.
    pub interval: u64,
    /// Without meaning in sums.
    pub random: u64,
    /// Zero.
    pub reserved: u64,
    /// Frees of sampled blocks.
    pub frees_matched: u64,
    /// `realloc(p, 0)` that freed.
    pub zero_reallocs: u64,
    /// A slot's calls when the last one was sampled; in sums, sampled calls that were left by a jump.
    pub sampled_call: u64,
    /// Bytes that sampled calls requested, less those that are known to have failed.
    pub sampled_bytes: u64,
}

/// Most allocators that are hooked in one process: each has code and slots of its own.
pub const MAX_ALLOCATORS: usize = 4;

/// A process that inline hooks count, in the map `INLINE`. The daemon adds those that it hooks, and the programs their
/// children.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct InlineProcess {
    /// Addresses of what is mapped, for each hooked allocator; 0 for none.
    pub bases: [u64; MAX_ALLOCATORS],
    /// One of [`inline_state`].
    pub state: u32,
    /// Pages of slots that could not be read at the end, because they were not in memory. Of a process in another's memory: 1 once
    /// `counts` is what it counted itself.
    pub unread_pages: u32,
    /// Whose memory it runs in: its own, or after `vfork` its parent's, where both count.
    pub memory_of: ProcessKey,
    /// The process that was hooked: itself, or the one it descends from.
    pub hooked: ProcessKey,
    /// What had been counted when it left its memory; zeros before. Of a process in another's memory: what its thread's slot held when it
    /// began, until it leaves that memory.
    pub counts: SlotSums,
}

/// What has become of an [`InlineProcess`].
pub mod inline_state {
    /// Its slots are in its memory.
    pub const RUNS: u32 = 0;
    /// It is about to run another program.
    pub const LEAVES: u32 = 1;
    /// It has left its memory, by an exit or an exec.
    pub const LEFT: u32 = 2;
}
