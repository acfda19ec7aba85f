//! What the programs write into the rings, and the kinds of it.

use super::ProcessKey;

/// Record kinds in the `EVENTS` ring.
pub mod kind {
    /// [`super::AllocationRecord`].
    pub const ALLOCATION: u32 = 1;
    /// [`super::FreeRecord`].
    pub const FREE: u32 = 2;
    /// [`super::ProcessRecord`]: a target forked.
    pub const FORK: u32 = 3;
    /// [`super::ProcessRecord`]: a process replaced its program.
    pub const EXEC: u32 = 4;
    /// [`super::ProcessRecord`]: the last thread of a process ended.
    pub const EXIT: u32 = 5;
    /// [`super::UnmapRecord`]: addresses are mapped no longer.
    pub const UNMAP: u32 = 6;
}

/// What stands in place of a [`Site`](super::Site)'s index in records of mappings that a program made itself (`--mmap`).
pub mod mapping {
    /// `mmap`.
    pub const MMAP: u32 = u32::MAX - 1;
    /// `mremap`.
    pub const MREMAP: u32 = u32::MAX - 2;
    /// `brk`.
    pub const BRK: u32 = u32::MAX - 3;
}

/// How the stack of a sample was taken.
pub mod stack_kind {
    /// No stack: only the caller's address is known (the reason is counted).
    pub const NONE: u32 = 0;
    /// The kernel's frame-pointer walk; `stack_id` is its key in the `STACK_TRACES` map.
    pub const FRAME_POINTERS: u32 = 1;
    /// Registers and a copy of the stack's top, in the `STACKS` ring under the same sample id.
    pub const COPIED: u32 = 2;
}

/// A sampled allocation that succeeded.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocationRecord {
    /// [`kind::ALLOCATION`].
    pub kind: u32,
    /// Thread id.
    pub tid: u32,
    /// Who called.
    pub process: ProcessKey,
    /// Whose address space the block is in.
    pub space: ProcessKey,
    /// Unique in this recording.
    pub sample: u64,
    /// CLOCK_MONOTONIC at the return of the call.
    pub time_ns: u64,
    /// What the allocator returned.
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
    /// 1 if the live map was full: this sample's free will not be seen.
    pub untracked: u32,
    /// Name of the thread, NUL-padded.
    pub thread_name: [u8; 16],
}

/// The free of a tracked sample.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FreeRecord {
    /// [`kind::FREE`].
    pub kind: u32,
    /// Thread that freed.
    pub tid: u32,
    /// Whose address space the block was in.
    pub space: ProcessKey,
    /// The sample's id.
    pub sample: u64,
    /// CLOCK_MONOTONIC at the entry of free, after the block left the live map.
    pub time_ns: u64,
    /// Bytes requested for the block.
    pub size_bytes: u64,
    /// 1 if the allocating thread frees it with no allocation call in between.
    pub temporary: u32,
    /// Zero.
    pub reserved: u32,
}

/// Addresses that a program unmapped, mapped over or moved away from, under `--mmap`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnmapRecord {
    /// [`kind::UNMAP`].
    pub kind: u32,
    /// Thread that called.
    pub tid: u32,
    /// Whose address space it is.
    pub space: ProcessKey,
    /// First address.
    pub start: u64,
    /// End of the range.
    pub end: u64,
    /// CLOCK_MONOTONIC at the entry of the call: what is mapped there since then stays.
    pub time_ns: u64,
}

/// A process forked, exec'ed or ended.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessRecord {
    /// One of [`kind::FORK`], [`kind::EXEC`], [`kind::EXIT`].
    pub kind: u32,
    /// For a fork: the child's process id.
    pub child_tgid: u32,
    /// CLOCK_MONOTONIC.
    pub time_ns: u64,
    /// Fork: the parent. Exec: the life that ends. Exit: the process.
    pub process: ProcessKey,
    /// Exec: the life that begins.
    pub next: ProcessKey,
}

/// Registers that unwinding needs, as they are just after the allocator returned to its caller.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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

/// Most calls of a thread that are awaited at once: one, plus those that signal handlers make inside it.
pub const AWAITED_CALLS: usize = 4;

/// A return address that is not on the stack, because the return is awaited: the kernel has put its trampoline there.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AwaitedReturn {
    /// The stack pointer at the function's entry; 0 if there is no such call.
    pub sp: u64,
    /// The return address.
    pub caller: u64,
}

/// Head of a record in the `STACKS` ring; `copied_bytes` bytes of stack from `registers.sp` up follow.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StackRecord {
    /// The sample's id.
    pub sample: u64,
    /// CLOCK_MONOTONIC, as in the allocation's record.
    pub time_ns: u64,
    /// Whose address space the stack is in.
    pub space: ProcessKey,
    /// Where to begin.
    pub registers: Registers,
    /// Calls around this one whose return is awaited.
    pub awaited: [AwaitedReturn; AWAITED_CALLS],
    /// Valid bytes that follow.
    pub copied_bytes: u32,
    /// 1 if the copy reaches the top of the stack as far as known; 0 if it was cut at the limit.
    pub whole: u32,
}
