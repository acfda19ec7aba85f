//! The layout of the blob in a target's memory, shared by the blob's code, the injector and the daemon.
//!
//! ```text
//!  base + 0         ELF header and dynamic symbols      ┐ the memfd: private, read and execute; file offset = address −
//!       + HEADER    Header: who made it, constants,     │ base. Never written while it is mapped, and inherited by
//!                   one Function per hooked function    │ forked children.
//!       + CODE      what all functions share, and sites │
//!       + TABLES    the tables of the geometric draw    │
//!       + STUBS     one stub per hooked function        │
//!       + DESCRIPTION  sections: symbols, .eh_frame     ┘
//!       + CONTROL   Control: written by the daemon      ─ anonymous, private; inherited by forked children
//!       + STATE     Totals, slots, filter, set          ─ anonymous, private, MADV_WIPEONFORK: a child starts empty
//! ```
//!
//! CONTROL and STATE are mapped first (zeroed). Then [`Control`] is written, then the text is mapped, then the jumps to
//! it are written. While the control page is zero, everything is counted and nothing is sampled. A forked child finds
//! its parent's control page and zeroed state: its threads claim slots anew, so it counts from its first call on, with
//! its parent's interval.
//!
//! # Counting
//! A thread owns the [`Slot`] whose key is its thread pointer (`fs:0`). So single instructions without a lock suffice,
//! and signal handlers cannot split them. Slots by CPU number would need a restartable sequence to be exact. Not every
//! C library registers those, and even without one the cost is the same (a pair of malloc and free, best of 200 rounds:
//! 0.80 to 0.83 ns more than bare, against 0.71 to 0.85 ns by thread pointer). Threads beyond [`SLOTS`] share
//! [`Totals::shared`], and lock. Totals are the sums over all slots and the shared one; they can be read at any moment,
//! without a stop. They never go down, except that a call of [`LARGE_BYTES`] or more, or a sampled one, is taken back
//! from `bytes` when it turns out to have failed. A thread that is killed inside an allocator may leave one call
//! counted without its bytes.

use core::mem::offset_of;

use sampler_ebpf::abi::inline::{SlotSums, memory};
use sampler_ebpf::geometric::DrawConstants;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// First word of [`Header`] and [`Control`]: `HEAPBPFi`.
pub const MAGIC: u64 = u64::from_le_bytes(*b"HEAPBPFi");
/// Version of this layout. Another version's blob is not touched.
pub const VERSION: u32 = 6;
/// The beginning of the memfd's name, which base address and length follow. `/proc/PID/maps` shows
/// `/memfd:heapbpf-inline-7f0000000000-6000 (deleted)`.
pub const MEMFD_NAME: &str = "heapbpf-inline";

/// Page size, bytes (x86-64).
pub const PAGE_BYTES: u64 = 4096;
/// Offset of [`Header`] from the base.
pub const HEADER: u64 = 0x1000;
/// Offset of the code that all functions share.
pub const CODE: u64 = 0x3000;
/// Offset of the tables of the geometric draw: logarithms, then reciprocals.
pub const TABLES: u64 = 0x4000;
/// Offset of the stubs.
pub const STUBS: u64 = 0x5000;
/// Bytes of one stub.
pub const STUB_BYTES: u64 = 0x180;
/// Offset of the ELF sections: symbols and unwind information, with which tools name and unwind the code.
pub const DESCRIPTION: u64 = 0x1_1000;
/// Bytes of text from the base on: the part of the memfd that is mapped.
pub const TEXT_BYTES: u64 = 0x1_5000;
/// Most functions of one blob.
pub const MAX_FUNCTIONS: usize = ((DESCRIPTION - STUBS) / STUB_BYTES) as usize;
/// Offset of [`Control`].
pub const CONTROL: u64 = TEXT_BYTES;
/// Bytes mapped for [`Control`].
pub const CONTROL_BYTES: u64 = PAGE_BYTES;
/// Offset of [`Totals`]: from here on, a fork wipes the memory.
pub const STATE: u64 = CONTROL + CONTROL_BYTES;
/// Offset of the slots.
pub const SLOTS_OFFSET: u64 = STATE + PAGE_BYTES;
/// Number of slots.
pub const SLOTS: usize = 1024;
/// A thread's slot is the one at bits 7 to 16 of (thread pointer · `HASH`) >> [`HASH_SHIFT`], or one of the next 31.
pub const HASH: i32 = 0x1e37_79b1;
/// See [`HASH`].
pub const HASH_SHIFT: u32 = 25;
/// Offset of the filter. It has one byte for each class of addresses: the number of sampled blocks in it, which stays
/// at 255.
pub const FILTER: u64 = SLOTS_OFFSET + SLOTS as u64 * size_of::<Slot>() as u64;
/// Bytes of the filter.
pub const FILTER_BYTES: u64 = 1 << 18;
/// Offset of the set of sampled blocks. It holds their addresses, each at most [`WINDOW_BYTES`] behind where its hash
/// says.
pub const SET: u64 = FILTER + FILTER_BYTES;
/// Bytes of the set in which an address may be. The set is longer than its number of entries says by this much.
pub const WINDOW_BYTES: u64 = 512;
/// Windows begin at multiples of this many bytes.
pub const BUCKET_BYTES: u64 = 64;
/// Bytes of an entry of the set.
pub const ENTRY_BYTES: u64 = 8;
/// Fewest entries of the set, as a power of two.
pub const MIN_SET_LOG2: u32 = 10;
/// Most entries of the set, as a power of two.
pub const MAX_SET_LOG2: u32 = 24;

/// The result of a call for this many bytes or more is always checked, because it may well be a failure.
pub const LARGE_BYTES: u64 = 1 << 30;

/// Bytes from the base to the end of a blob whose set has 2^`set_log2` entries; whole pages.
#[must_use]
pub const fn mapped_bytes(set_log2: u32) -> u64 {
    (SET + (ENTRY_BYTES << set_log2) + WINDOW_BYTES).next_multiple_of(PAGE_BYTES)
}

/// A trial is a byte, as `sampler_ebpf::trials::CRITERION_BYTES`.
pub const CRITERION_BYTES: u32 = 0;
/// A trial is an allocation, as `sampler_ebpf::trials::CRITERION_ALLOCATIONS`.
pub const CRITERION_ALLOCATIONS: u32 = 1;

/// Constants of a blob, at [`HEADER`], followed by [`Function`]s.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: u64,
    /// [`VERSION`].
    pub version: u32,
    /// [`CRITERION_BYTES`] or [`CRITERION_ALLOCATIONS`].
    pub criterion: u32,
    /// Hash of the shared code: blobs of one version are the same.
    pub code_hash: u64,
    /// The set has 2^`set_log2` entries.
    pub set_log2: u32,
    /// Number of [`Function`]s.
    pub functions: u32,
    /// Bits of the offset of a window: entries · 8 − [`BUCKET_BYTES`].
    pub set_mask: u64,
    /// `HEADER_*` flags.
    pub flags: u64,
    /// Device, inode and modification time of the file whose functions are hooked. They show whether a blob that is
    /// found belongs to the current plan. Only the daemon reads them.
    pub file: [u64; 3],
    /// How an interpreter is directed to its object allocator's hooked functions; zeroes if these are not hooked.
    pub leads: [Lead; MAX_OBJECT_FUNCTIONS],
}

/// Most functions of an interpreter's object allocator.
pub const MAX_OBJECT_FUNCTIONS: usize = 4;

/// A word of the target's memory through which a function is called. While hooked, it holds the address of the
/// function's stub; before and afterwards, the function's own address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Lead {
    /// Address of the word, a multiple of eight; 0 if there is none.
    pub word: u64,
    /// The function.
    pub function: u64,
    /// Its stub.
    pub stub: u64,
}

/// The machine has `rdrand`, which seeds threads. (`rdtsc` may be forbidden to a process.)
pub const HEADER_RDRAND: u64 = 1;

/// The function has no such argument.
pub const NO_ARGUMENT: u8 = 0xff;

/// A hooked function, in the order of the stubs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Function {
    /// The function's number for the BPF programs in the low half; its index in this table in the upper half.
    pub number: u32,
    /// `FUNCTION_*` flags.
    pub flags: u32,
    /// Offset from the base at which the original function can be called: its displaced instructions, and a jump to the
    /// rest of it.
    pub original: u32,
    /// The same for the function that is called instead if the call is sampled, because it does not throw; 0 if there
    /// is none.
    pub twin: u32,
    /// Address of the function in the target.
    pub address: u64,
    /// Number of bytes of the function that were displaced.
    pub displaced: u32,
    /// Number of the argument with the size, from 0; [`NO_ARGUMENT`] if there is none.
    pub size_argument: u8,
    /// The argument that the size is multiplied by.
    pub times_argument: u8,
    /// The argument with the block to free or reallocate.
    pub old_argument: u8,
    /// Zero.
    pub reserved: u8,
}

/// `realloc(p, 0)` frees `p`.
pub const FUNCTION_ZERO_FREES: u32 = 1;
/// The block is stored where the first argument points; the result is 0 on success.
pub const FUNCTION_OUT: u32 = 2;
/// The function may throw. Sampled calls call its twin; without one, their results are not seen.
pub const FUNCTION_THROWS: u32 = 4;
/// The twin takes an additional second argument, a reference that it does not use.
pub const FUNCTION_REFERENCE_SECOND: u32 = 8;
/// The same, as its third argument.
pub const FUNCTION_REFERENCE_THIRD: u32 = 16;
/// The twin takes the first two arguments in the other order.
pub const FUNCTION_SWAPPED: u32 = 32;
/// The function belongs to an interpreter's object allocator, which calls other hooked functions. Those calls are part
/// of its own call, and the thread's slot is marked while it runs ([`Slot::inside`]).
pub const FUNCTION_OF_OBJECTS: u32 = 64;

/// A call with the stack pointer at most this many bytes below [`Slot::inside`] is made by the object allocator. A
/// signal handler that leaves the allocator by a jump leaves a stale value behind, but only calls within this distance
/// can be misjudged.
pub const INSIDE_BYTES: u64 = 1 << 16;

/// Number of elements of [`Control::draws`]. An element does not change while a thread may be reading it.
pub const DRAWS: usize = 64;

/// What the daemon changes while the target runs, at [`CONTROL`]. The blob itself writes [`Control::passed`] and the
/// fields behind it, and in a forked child [`Control::seed`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Control {
    /// [`MAGIC`].
    pub magic: u64,
    /// [`VERSION`].
    pub version: u64,
    /// Index of the constants in use. Written last, after `draws`. Each thread uses them from its next draw on, or at
    /// once if it has not drawn before.
    pub draw: u64,
    /// Seed of the draws; 0 for unpredictable ones. Read when a thread begins, and changed by the first thread of a
    /// forked child.
    pub seed: u64,
    /// If not 0, nothing is sampled. Threads draw and count down as usual, and their draws stay valid when sampling
    /// resumes: each trial is independent of all others.
    pub paused: u64,
    /// Constants by index. An interval of 0 samples nothing.
    pub draws: [DrawConstants; DRAWS],
    /// Number of sites that may be passed since the code was mapped; 0 for any number. Threads that come to a site
    /// beyond it wait.
    pub granted: u64,
    /// A thread's wait ends after this many `pause` instructions; 0 if no thread may wait. A wait makes no system call,
    /// which a seccomp filter could forbid.
    pub most_pauses: u64,
    /// All waits end when [`Control::pauses`] has reached this.
    pub pauses_end: u64,
    /// Sites that were passed while [`Control::granted`] was not 0. A forked child continues its parent's count.
    pub passed: u64,
    /// [`Control::granted`] when a wait was abandoned: no thread waits until it changes.
    pub given_up: u64,
    /// `pause` instructions of all waits, counted in steps of [`PAUSES_AT_ONCE`].
    pub pauses: u64,
    /// State of the random numbers after the last draw of any thread; 0 before the first. A forked child has its
    /// parent's, although its slots are empty.
    pub drawn: u64,
}

/// Pauses after which a thread checks how many all threads have made.
pub const PAUSES_AT_ONCE: u64 = 64;

/// Offset of [`Control::passed`] from [`CONTROL`]. Threads write there, so it is in a cache line that no unsampled call
/// reads.
pub const PASSED_OFFSET: u64 = offset_of!(Control, passed) as u64;
const _: () = assert!(PASSED_OFFSET.is_multiple_of(64) && size_of::<Control>() as u64 <= CONTROL_BYTES);

/// Counts of one thread. Only the blob writes them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Slot {
    /// The thread pointer; 0 if the slot is free.
    pub key: u64,
    /// Trials until the next success. Signed: 0 or less if nothing has been drawn.
    pub countdown: u64,
    /// Outermost calls of allocation functions, including failed ones.
    pub calls: u64,
    /// Bytes that these calls requested, without those of calls that are known to have failed.
    pub bytes: u64,
    /// Sampled calls, whatever their outcome.
    pub sampled: u64,
    /// Sampled calls that succeeded and passed a site. `sampled − reported − failed` calls never returned.
    pub reported: u64,
    /// Sampled calls that failed.
    pub failed: u64,
    /// Unsampled calls that are known to have failed.
    pub unsampled_failed: u64,
    /// Interval with which `countdown` was drawn; 0 if nothing is sampled.
    pub interval: u64,
    /// State of the random number generator; 0 if not seeded.
    pub random: u64,
    /// Zero.
    pub reserved: u64,
    /// Frees of sampled blocks, including those by realloc.
    pub frees_matched: u64,
    /// `realloc(p, 0)` that freed: these do not count as calls.
    pub zero_reallocs: u64,
    /// `calls` at the last sampled call, including it. A sampled call that did not end and is not the thread's last
    /// call was left by a jump.
    pub sampled_call: u64,
    /// Bytes that sampled calls requested, without those of calls that are known to have failed.
    pub sampled_bytes: u64,
    /// The stack pointer at the call while a function of an object allocator runs; otherwise 0. Never set in the shared
    /// slot.
    pub inside: u64,
}

/// Counts of the whole process, at [`STATE`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Totals {
    /// Number of threads that have begun: each gets its ordinal, for its seed.
    pub threads: u64,
    /// Calls by threads that found no slot, each counted once.
    pub slots_full: u64,
    /// Sampled blocks that the set had no place for: their frees are not seen.
    pub set_full: u64,
    /// Not 0 once the daemon has granted sites. Zeroed by a fork, so that a child does not wait before the daemon knows
    /// it.
    pub may_wait: u64,
    /// 1 in the process for which the code was mapped. Zeroed by a fork, so that a child draws numbers of its own.
    pub is_original: u64,
    /// Zero.
    pub reserved: [u64; 11],
    /// The slot of all threads without their own.
    pub shared: Slot,
}

// The BPF programs read the slots of an ending process by these numbers.
const _: () = assert!(
    memory::CONTROL == CONTROL
        && memory::MAGIC == MAGIC
        && memory::THREADS == STATE + offset_of!(Totals, threads) as u64
        && memory::SHARED_SLOT == STATE + offset_of!(Totals, shared) as u64
        && memory::SLOTS == SLOTS_OFFSET
        && memory::SLOT_COUNT == SLOTS as u64
        && memory::HASH == HASH as u64
        && memory::HASH_SHIFT == HASH_SHIFT
        && memory::SLOT_BYTES == size_of::<Slot>() as u64
        && offset_of!(SlotSums, calls) == offset_of!(Slot, calls)
        && offset_of!(SlotSums, bytes) == offset_of!(Slot, bytes)
        && offset_of!(SlotSums, sampled) == offset_of!(Slot, sampled)
        && offset_of!(SlotSums, reported) == offset_of!(Slot, reported)
        && offset_of!(SlotSums, failed) == offset_of!(Slot, failed)
        && offset_of!(SlotSums, unsampled_failed) == offset_of!(Slot, unsampled_failed)
        && offset_of!(SlotSums, frees_matched) == offset_of!(Slot, frees_matched)
        && offset_of!(SlotSums, zero_reallocs) == offset_of!(Slot, zero_reallocs)
        && offset_of!(SlotSums, sampled_call) == offset_of!(Slot, sampled_call)
        && offset_of!(SlotSums, sampled_bytes) == offset_of!(Slot, sampled_bytes)
);

/// The code that all hooked functions share, and the offsets of its entries.
#[derive(Clone, Copy, Debug)]
pub struct Code<'a> {
    /// The instructions.
    pub bytes: &'a [u8],
    /// Offsets into them.
    pub entries: Entries,
}

/// Offsets of entries into the shared code.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entries {
    /// A counted allocation whose countdown has ended: `rax` size, `r10` slot, `r11` its
    /// [`Function`].
    pub allocation_ends_countdown: u32,
    /// An allocation of an unusual size, or without a slot of its own, not counted yet: registers as above.
    pub allocation: u32,
    /// A reallocation of a block that may be sampled: `r11` its function.
    pub reallocation: u32,
    /// A free of a block that may be sampled: `r11` its function.
    pub free: u32,
    /// A call whose size does not fit into 64 bits: `r10` slot, `r11` its function.
    pub refused: u32,
    /// A subroutine. In: `rax` thread pointer, `r10` its first slot, `r11` the slots. Out: `r10` the thread's slot, or
    /// the shared one and the carry flag.
    pub claim: u32,
    /// A function as in C: `fn(random: u64, constants: *const DrawConstants) -> u64`.
    pub draw: u32,
    /// Site [`SYMBOL_RESULT`](sampler_ebpf::abi::inline::SYMBOL_RESULT).
    pub site_result: u32,
    /// Site [`SYMBOL_FREEING`](sampler_ebpf::abi::inline::SYMBOL_FREEING).
    pub site_freeing: u32,
    /// Site [`SYMBOL_REALLOCATING`](sampler_ebpf::abi::inline::SYMBOL_REALLOCATING).
    pub site_reallocating: u32,
    /// Site [`SYMBOL_UNSEEN`](sampler_ebpf::abi::inline::SYMBOL_UNSEEN).
    pub site_unseen: u32,
    /// First instruction with a frame of [`FRAME_BYTES`] on the stack while the original function runs.
    pub framed: u32,
    /// First instruction without that frame again.
    pub framed_end: u32,
}

/// Bytes between the stack pointer and the return address while the shared code has a frame.
pub const FRAME_BYTES: u32 = 104;
