//! The records that the programs write into the rings, and their kinds.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::ProcessKey;

/// Record kinds in the `EVENTS` ring.
pub mod kind {
    /// [`super::AllocationRecord`].
    pub const ALLOCATION: u32 = 1;
    /// [`super::FreeRecord`].
    pub const FREE: u32 = 2;
    /// [`super::ProcessRecord`]: a target forked.
    pub const FORK: u32 = 3;
    /// [`super::ProcessRecord`]: a process executed a new program.
    pub const EXEC: u32 = 4;
    /// [`super::ProcessRecord`]: the last thread of a process exited.
    pub const EXIT: u32 = 5;
    /// [`super::UnmapRecord`]: addresses are no longer mapped.
    pub const UNMAP: u32 = 6;
    /// [`super::ProcessRecord`]: an exec dropped the daemon's state of a process. That state may already be the new
    /// program's, because the kernel reports its mappings before the exec ends.
    pub const RESET: u32 = 7;
    /// [`super::CrashRecord`]: a process is about to die of a fault.
    pub const CRASH: u32 = 8;
    /// [`super::ProcessRecord`]: the program of a listed process has ended, by an exec or the exit, and nothing counted
    /// it. Precedes the record of the exit. Appears twice where the kernel runs each BPF program twice.
    pub const UNCOUNTED: u32 = 9;
}

/// Values that replace a [`Site`](super::Site)'s index in records of mappings that a program made itself (`--mmap`).
pub mod mapping {
    /// `mmap`.
    pub const MMAP: u32 = u32::MAX - 1;
    /// `mremap`.
    pub const MREMAP: u32 = u32::MAX - 2;
    /// `brk`.
    pub const BRK: u32 = u32::MAX - 3;
}

/// How the stack of a sample was captured.
pub mod stack_kind {
    /// No stack: only the caller's address is known (the reason is counted).
    pub const NONE: u32 = 0;
    /// The kernel's frame-pointer walk; `stack_id` is its key in the `STACK_TRACES` map.
    pub const FRAME_POINTERS: u32 = 1;
    /// Registers and a copy of the stack's top, in the stacks ring under the same sample id.
    pub const COPIED: u32 = 2;
    /// No stack: its copy did not fit into the stacks ring.
    pub const LOST_NO_SPACE: u32 = 3;
    /// No stack: the `STACK_TRACES` map had no free slot for it.
    pub const LOST_TABLE_FULL: u32 = 4;
}

/// Why a copy of a stack ends where it does.
pub mod copy_end {
    /// It reached the top of the stack, as far as that is known.
    pub const TOP: u32 = 0;
    /// It is as long as [`Config::stack_bytes`](crate::abi::Config::stack_bytes).
    pub const STACK_BYTES: u32 = 1;
    /// The top of the stack is not known, and the copy has reached the process's limit in the `STACK_LIMITS` map.
    pub const PROCESS_LIMIT: u32 = 2;
    /// The stacks ring had no space for more.
    pub const NO_SPACE: u32 = 3;
}

/// A sampled allocation that succeeded.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct AllocationRecord {
    /// [`kind::ALLOCATION`].
    pub kind: u32,
    /// Thread id.
    pub tid: u32,
    /// The process that called.
    pub process: ProcessKey,
    /// The owner of the address space that the block is in.
    pub space: ProcessKey,
    /// Unique in this recording.
    pub sample: u64,
    /// CLOCK_MONOTONIC at the return of the call.
    pub time_ns: u64,
    /// The address that the allocator returned.
    pub address: u64,
    /// Bytes requested.
    pub size_bytes: u64,
    /// Sampling interval R that this sample was drawn with.
    pub interval: u64,
    /// Trials that the allocation took (bytes, at least 1, under the default criterion).
    pub trials: u64,
    /// Failed trials of this allocation before the successful one.
    pub offset: u64,
    /// Return address of the call.
    pub caller: u64,
    /// Index of the [`Site`](super::Site).
    pub site: u32,
    /// One of [`stack_kind`].
    pub stack_kind: u32,
    /// Key in the kernel's stack map, for [`stack_kind::FRAME_POINTERS`].
    pub stack_id: i32,
    /// 1 if the live map was full, so that this sample's free will not be seen.
    pub untracked: u32,
    /// Name of the thread, NUL-padded.
    pub thread_name: [u8; 16],
}

/// The free of a tracked sample.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct FreeRecord {
    /// [`kind::FREE`].
    pub kind: u32,
    /// Thread that freed.
    pub tid: u32,
    /// The owner of the address space that the block was in.
    pub space: ProcessKey,
    /// The sample's id.
    pub sample: u64,
    /// CLOCK_MONOTONIC at the entry of free, after the block left the live map.
    pub time_ns: u64,
    /// Bytes requested for the block.
    pub size_bytes: u64,
    /// 1 if the allocating thread frees the block with no allocation call in between.
    pub temporary: u32,
    /// Zero.
    pub reserved: u32,
}

/// Addresses that a program unmapped, mapped over or moved away from (`--mmap`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct UnmapRecord {
    /// [`kind::UNMAP`].
    pub kind: u32,
    /// Thread that called.
    pub tid: u32,
    /// The owner of the address space.
    pub space: ProcessKey,
    /// First address of the range.
    pub start: u64,
    /// End of the range.
    pub end: u64,
    /// CLOCK_MONOTONIC at the entry of the call. Mappings made there since then are not affected.
    pub time_ns: u64,
}

/// A process forked, exec'ed or exited.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ProcessRecord {
    /// [`kind::FORK`], or another kind of [`kind`] with such a record.
    pub kind: u32,
    /// Exit: CPU time that the process has used, µs, at most [`u32::MAX`]. Otherwise 0.
    pub cpu_us: u32,
    /// CLOCK_MONOTONIC.
    pub time_ns: u64,
    /// Fork: the parent. Exec: the process generation that ends. Exit: the process.
    pub process: ProcessKey,
    /// Fork: the child. Exec: the process generation that begins.
    pub next: ProcessKey,
}

/// A thread of any process gets SIGILL, SIGTRAP, SIGBUS or SIGSEGV for something that it did, and its process dies of
/// that.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct CrashRecord {
    /// [`kind::CRASH`].
    pub kind: u32,
    /// The signal.
    pub signal: u32,
    /// CLOCK_MONOTONIC.
    pub time_ns: u64,
    /// The process.
    pub process: ProcessKey,
    /// The thread's instruction pointer.
    pub ip: u64,
}

/// The registers needed for unwinding, as they are just after the allocator returned to its caller.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Registers {
    /// Instruction pointer: the return address.
    pub ip: u64,
    /// Stack pointer.
    pub sp: u64,
    /// Frame pointer register (x86-64: rbp, aarch64: x29).
    pub fp: u64,
    /// Link register (aarch64), else 0.
    pub lr: u64,
}

/// Maximum number of calls in flight per thread: one, plus those that signal handlers make during it.
pub const MAX_IN_FLIGHT_CALLS: usize = 4;

/// A call in flight whose return is probed. The kernel has replaced its return address on the stack with its
/// trampoline.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct InFlightCall {
    /// The stack pointer at the function's entry; 0 if there is no such call.
    pub sp: u64,
    /// The return address.
    pub caller: u64,
}

/// Header of a record in the stacks ring. It is followed by `copied_bytes` bytes of stack from `registers.sp` up, or,
/// if there are pieces, by an [`OuterCopy`] and then these bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct StackRecord {
    /// The sample's id.
    pub sample: u64,
    /// CLOCK_MONOTONIC, as in the allocation's record.
    pub time_ns: u64,
    /// The owner of the address space that the stack is in.
    pub space: ProcessKey,
    /// The registers at which unwinding begins.
    pub registers: Registers,
    /// Calls in flight around this one whose returns are probed.
    pub in_flight: [InFlightCall; MAX_IN_FLIGHT_CALLS],
    /// Number of valid bytes that follow.
    pub copied_bytes: u32,
    /// Why there are no more, one of [`copy_end`].
    pub ends_at: u32,
    /// Number of pages that were not in memory and are zeros in the copy. If there are too many, the copy ends early.
    pub missing_pages: u32,
    /// Number of pieces of [`OuterCopy`]; 0 for a copy in one piece.
    pub pieces: u32,
    /// The top of the stack, if the copy [ends there](copy_end::TOP).
    pub top: u64,
}

/// Maximum number of pieces that are copied of a stack's outer frames.
pub const OUTER_PIECES: usize = 8;
/// Maximum size of a piece, bytes.
pub const OUTER_PIECE_BYTES: usize = 1024;

/// A piece of a stack.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct StackPiece {
    /// Address of its first byte.
    pub start: u64,
    /// Number of bytes, at most [`OUTER_PIECE_BYTES`].
    pub bytes: u64,
}

/// Key of a thread's stack, in the map `OUTER_FRAMES`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct StackKey {
    /// The owner of the address space that it is in.
    pub space: ProcessKey,
    /// Its top.
    pub top: u64,
}

/// The data that walks read in a stack's outer frames: those that stay there all the time, such as `main`'s. As long as
/// they do, the rest of these frames is not copied.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct OuterFrames {
    /// The return address that leads to the first of these frames, and the return address of that first frame. If
    /// either place holds another word, the frames are different ones.
    pub slots: [StackSlot; 2],
    /// Everything that is read above the first slot, by address. The first piece without bytes ends the list.
    pub pieces: [StackPiece; OUTER_PIECES],
}

/// A return address on a stack.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct StackSlot {
    /// Its address.
    pub address: u64,
    /// The word there.
    pub return_address: u64,
}

/// The copy of a stack's outer frames. The bytes that follow it reach up to the return address that leads to these
/// frames.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct OuterCopy {
    /// The pieces that were copied.
    pub pieces: [StackPiece; OUTER_PIECES],
    /// Their bytes.
    pub bytes: [[u8; OUTER_PIECE_BYTES]; OUTER_PIECES],
}
