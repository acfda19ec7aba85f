//! The data that crosses between kernel and daemon: map keys, map values, ring-buffer records.
//!
//! Every type is `#[repr(C)]`, holds plain integers only and has no padding that is not a named field.

mod counters;
mod records;
mod site;

pub use counters::*;
pub use records::*;
pub use site::*;

/// One life of a process between two `exec`s: never a bare pid, which the kernel reuses.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessKey {
    /// `start_boottime` of the thread-group leader, nanoseconds.
    pub start_ns: u64,
    /// Process id in the initial pid namespace.
    pub tgid: u32,
    /// The kernel's `self_exec_id`: grows with every `exec`.
    pub exec_id: u32,
}

/// A live block: an address in one address space. The space is named by the process that owns it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LiveKey {
    /// Owner of the address space (a `vfork` child has its parent's).
    pub space: ProcessKey,
    /// What the allocator returned.
    pub address: u64,
}

/// What the kernel keeps of a sampled allocation until its free: enough to count it even if its record was lost.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LiveValue {
    /// The sample's id, see [`AllocationRecord::sample`].
    pub sample: u64,
    /// CLOCK_MONOTONIC at the return of the call.
    pub time_ns: u64,
    /// The allocating thread's number of allocation calls so far (this one included).
    pub thread_calls: u64,
    /// Bytes requested.
    pub size_bytes: u64,
    /// Trials that the allocation took.
    pub trials: u64,
    /// Sampling interval R that it was drawn with, in trials; at most 2^26.
    pub interval: u32,
    /// Failed trials of this allocation before the successful one; a draw is below 2^32.
    pub offset: u32,
    /// Thread that allocated.
    pub tid: u32,
    /// Index of the [`Site`].
    pub site: u32,
}

/// Which processes are targets besides those in the `TARGETS` map; bits.
pub mod target_rule {
    /// Every process.
    pub const ALL: u32 = 1;
    /// Those whose main thread's name matches the pattern.
    pub const COMM: u32 = 2;
    /// Those in a cgroup or below it.
    pub const CGROUP: u32 = 4;
}

/// Constants of a recording, patched into the programs' read-only data before they are loaded: the verifier then
/// removes what this recording does not need.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Bits of [`target_rule`].
    pub target_rules: u32,
    /// 1: children of targets are targets.
    pub follow: u32,
    /// 1: frees are followed.
    pub live: u32,
    /// How stacks are taken, one of [`stack_kind`].
    pub stack_kind: u32,
    /// heapbpf's own process id: never a target.
    pub self_tgid: u32,
    /// Zero.
    pub reserved: u32,
    /// What a trial is, one of `trials::CRITERION_*`.
    pub criterion: u64,
    /// Most bytes of stack copied.
    pub stack_bytes: u64,
    /// Seed of the draws, 0: unpredictable.
    pub seed: u64,
    /// Fill of the events ring, in bytes, at which the daemon is woken.
    pub events_mark: u64,
    /// The same for the stacks ring.
    pub stacks_mark: u64,
    /// cgroup id, for [`target_rule::CGROUP`].
    pub cgroup_id: u64,
    /// Its depth below the root.
    pub cgroup_level: u64,
    /// Memory that the host has for anyone, bytes: what asks for more than this fails.
    pub memory_bytes: u64,
    /// Bytes of a page, as the kernel counts them.
    pub page_bytes: u64,
    /// Pattern for [`target_rule::COMM`], NUL-padded; `*` and `?` as in a shell.
    pub comm_pattern: [u8; 16],
    /// Offsets of the kernel's own structures, from its BTF.
    pub offsets: KernelOffsets,
}

/// Byte offsets of members of kernel structures on the running kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelOffsets {
    /// `task_struct.mm`
    pub task_mm: u64,
    /// `task_struct.group_leader`
    pub task_group_leader: u64,
    /// `task_struct.start_boottime`
    pub task_start_boottime: u64,
    /// `task_struct.self_exec_id`
    pub task_self_exec_id: u64,
    /// `task_struct.tgid`
    pub task_tgid: u64,
    /// `task_struct.comm`
    pub task_comm: u64,
    /// `task_struct.signal`
    pub task_signal: u64,
    /// `task_struct.thread` has it in places that differ by machine
    pub task_thread_pointer: u64,
    /// `signal_struct.live`
    pub signal_live: u64,
    /// `mm_struct.owner`; [`KernelOffsets::ABSENT`] if the kernel keeps none
    pub mm_owner: u64,
    /// `mm_struct.start_stack`
    pub mm_start_stack: u64,
    /// `mm_struct.brk`
    pub mm_brk: u64,
    /// `mm_struct.total_vm`
    pub mm_total_vm: u64,
    /// `mm_struct.data_vm`
    pub mm_data_vm: u64,
    /// `signal_struct.rlim`
    pub signal_rlim: u64,
}

impl KernelOffsets {
    /// The kernel has no such member.
    pub const ABSENT: u64 = u64::MAX;
}

/// What the daemon changes while the programs run: the single value of the `CONTROL` map, which only it writes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Control {
    /// Constants of the geometric draw for the interval now in force; threads take them at their next draw.
    pub draw: crate::geometric::DrawConstants,
    /// Grows when the set of targets changes, so that threads once refused are looked at again.
    pub targets_generation: u64,
}

/// What the programs count over all threads: the single value of the `PROGRESS` map, which only they write.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Threads with state so far: gives each its ordinal.
    pub threads: u64,
    /// Threads whose counters were added to their process's totals so far.
    pub threads_flushed: u64,
    /// Allocations and frees so far whose records did not fit into the events ring.
    pub records_lost: u64,
}
