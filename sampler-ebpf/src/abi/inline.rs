//! The interface between inline hooks and the BPF programs: the probe sites in the code that is mapped into a target,
//! and the registers there (x86-64).
//!
//! Each site is a one-byte no-op, aligned to eight bytes, with its own symbol in the mapped file (`SYMBOL_*`). (Linux
//! 6.18 turns a probed five-byte no-op into a call into a page that a forked child does not inherit, which kills the
//! child.) The stack pointer is the same as at the hooked function's entry: the word there is the return address, and
//! nothing below it is in use. Callee-saved registers hold the caller's values. So the first frame is the caller
//! itself. A thread passes a site only for a sampled call or a sampled block; a probe there that does nothing changes
//! nothing.
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
//! Bits 0 to 15 of `r10` are the number of [`Site::function`](super::Site::function) as assigned by the daemon, bits 16
//! to 31 the function's index among those of this blob, and bits 32 to 63 flags. *Offset* is the number of failed
//! trials of this allocation before the successful one. *The thread's calls* include this call.
//!
//! A thread passes its sites in the order of events:
//! - malloc and similar functions: RESULT with [`flag::SAMPLED`] if the call succeeded; nothing if it failed.
//! - free of a sampled block: FREEING, before the block is freed. From then on, the block is no longer known.
//! - realloc of a sampled block: REALLOCATING before the call, then always RESULT with that block in `r9`. With
//!   [`flag::FAILED`], the old block is still in use and stays known; without it, it was freed. [`flag::SAMPLED`] says
//!   whether the new block is a sample, too. Between the two sites, other threads may get the old block's address, so
//!   the block must have left the live map at REALLOCATING. If the call never returns (`longjmp`), RESULT does not
//!   follow. If the twin that is called instead of a throwing function fails, RESULT with [`flag::FAILED`] precedes the
//!   call of the function itself: `rdi` to `r8` are then its arguments.
//! - realloc of another block: RESULT as for malloc, with `r9` = 0.
//! - a function that may throw, whose result cannot be awaited: UNSEEN before the call; the block is not known. Offset
//!   and interval have 32 bits there.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::ProcessKey;

/// Symbol of the site after an allocation function's call, where the outcome is known.
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
    /// The block could not be recorded (its set is full), so its free will not be seen.
    pub const UNTRACKED: u32 = 8;
}

/// How to call the twin of a function that may throw. The twin returns NULL instead of throwing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TwinArguments {
    /// With the same arguments.
    Same,
    /// With the first two swapped.
    Swapped,
    /// With an additional reference that the twin does not use (`std::nothrow`), as this argument (from 0).
    WithReference(u8),
}

/// Right shift of `r10` that gives its flags, and of `rax` that gives the interval.
pub const UPPER_HALF: u32 = 32;
/// Number of bits of `r10` with the function's number.
pub const NUMBER_BITS: u32 = 16;
/// Bits of a cookie, in addition to the first site's index: the kind of site that it is linked to. If none is set, the
/// outcome of a call is known there.
pub const SITE_KINDS: u64 = UNSEEN_SITE | FREEING_SITE | REALLOCATING_SITE;
/// A sampled call is about to be made whose result will not be seen.
pub const UNSEEN_SITE: u64 = 1 << 63;
/// A sampled block is about to be freed.
pub const FREEING_SITE: u64 = 1 << 62;
/// A sampled block is about to be reallocated.
pub const REALLOCATING_SITE: u64 = 1 << 61;

/// Addresses of the target's own counts, relative to the base of the memory that is mapped into it.
/// `heapbpf_inline::abi` has the whole layout.
pub mod memory {
    /// Offset of the control page, whose first word is [`MAGIC`].
    pub const CONTROL: u64 = 0x1_5000;
    /// The first word of the control page.
    pub const MAGIC: u64 = u64::from_le_bytes(*b"HEAPBPFi");
    /// Offset of the number of threads that have started.
    pub const THREADS: u64 = 0x1_6000;
    /// Offset of the slot shared by all threads without a slot of their own.
    pub const SHARED_SLOT: u64 = 0x1_6080;
    /// Offset of the threads' slots.
    pub const SLOTS: u64 = 0x1_7000;
    /// Number of these slots.
    pub const SLOT_COUNT: u64 = 1024;
    /// Distance from one slot to the next, bytes.
    pub const SLOT_BYTES: u64 = 128;
    /// Number of slots per memory page.
    pub const SLOTS_OF_PAGE: u64 = 32;
    /// A thread's slot is found by multiplying its thread pointer by this number and shifting by [`HASH_SHIFT`]. It is
    /// that slot or one of the next, [`TRIES`] in all.
    pub const HASH: u64 = 0x1e37_79b1;
    /// See [`HASH`].
    pub const HASH_SHIFT: u32 = 25;
    /// See [`HASH`].
    pub const TRIES: u64 = 32;
}

/// The words of a slot that are summed.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SlotSums {
    /// A slot's thread pointer; in sums, the number of threads that have started.
    pub threads: u64,
    /// Has no meaning in sums.
    pub countdown: u64,
    /// Outermost calls of allocation functions, failed ones included.
    pub calls: u64,
    /// Bytes that they requested, minus those of calls that are known to have failed.
    pub bytes: u64,
    /// Sampled calls.
    pub sampled: u64,
    /// Sampled calls that succeeded and passed a site.
    pub reported: u64,
    /// Sampled calls that failed.
    pub failed: u64,
    /// Unsampled calls that are known to have failed.
    pub unsampled_failed: u64,
    /// Has no meaning in sums.
    pub interval: u64,
    /// Has no meaning in sums.
    pub random: u64,
    /// Zero.
    pub reserved: u64,
    /// Frees of sampled blocks.
    pub frees_matched: u64,
    /// Calls `realloc(p, 0)` that freed their block.
    pub zero_reallocs: u64,
    /// A slot's number of calls when the last one was sampled; in sums, sampled calls that were left by a jump.
    pub sampled_call: u64,
    /// Bytes that sampled calls requested, minus those of calls that are known to have failed.
    pub sampled_bytes: u64,
}

/// Maximum number of allocators hooked in one process. Each has its own code and slots.
pub const MAX_ALLOCATORS: usize = 4;

/// A process that inline hooks count, in the map `INLINE`. The daemon adds the processes that it hooks, and the
/// programs add their children.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct InlineProcess {
    /// Base addresses of the mapped memory of each hooked allocator; 0 for none.
    pub bases: [u64; MAX_ALLOCATORS],
    /// One of [`inline_state`].
    pub state: u32,
    /// Number of slot pages that could not be read at the end, because they were not in memory. For a process in
    /// another one's memory: 1 once `counts` holds its own counts.
    pub unread_pages: u32,
    /// The owner of the memory that it runs in: itself, or its parent after `vfork`, when both count there.
    pub memory_of: ProcessKey,
    /// The process that was hooked: itself, or an ancestor.
    pub hooked: ProcessKey,
    /// Its counts when it left its memory; zeros before. For a process in another one's memory, until it leaves that
    /// memory: the contents of its thread's slot when it began.
    pub counts: SlotSums,
}

/// States of an [`InlineProcess`].
pub mod inline_state {
    /// Its slots are in its memory.
    pub const RUNS: u32 = 0;
    /// It is about to execute another program.
    pub const LEAVES: u32 = 1;
    /// It has left its memory, by an exit or an exec.
    pub const LEFT: u32 = 2;
}
