//! The data exchanged between kernel and daemon: map keys, map values, ring-buffer records.
//!
//! Every type is `#[repr(C)]`, contains only plain integers, and has no padding other than named fields. The derived
//! zerocopy traits check that, and let the daemon convert between bytes and values without `unsafe`.

mod counters;
pub mod inline;
#[cfg(test)]
mod layout;
mod python;
mod records;
mod site;

pub use counters::*;
pub use python::*;
pub use records::*;
pub use site::*;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// A process generation: one program run by a process, from one `exec` to the next. A bare pid would not do, because
/// the kernel reuses pids.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct ProcessKey {
    /// `start_boottime` of the thread-group leader, nanoseconds.
    pub start_ns: u64,
    /// Process id in the initial pid namespace.
    pub tgid: u32,
    /// The kernel's `self_exec_id`, which grows with every `exec`.
    pub exec_id: u32,
}

/// A thread of a live process.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct LivingThread {
    /// Its process.
    pub process: ProcessKey,
    /// Number of users of its memory: threads (also of other processes), and kernel code that is reading it at the
    /// moment. 0 if the process has left its memory.
    pub memory_users: u64,
    /// CPU time that it has used, ns. For the first thread, this includes the threads that have ended.
    pub cpu_ns: u64,
    /// What the kernel does at its system calls ([`syscall_work`]). 0 on kernels without uretprobe(2): their probes
    /// make no system calls.
    pub syscall_work: u64,
}

/// Bits of the kernel's `thread_info.syscall_work`: `enum syscall_work_bit` in `include/linux/thread_info.h`, with the
/// same values since Linux 5.11.
pub mod syscall_work {
    /// A tracer sees each call (bit `SYSCALL_TRACE`), or makes it in place of the kernel (`SYSCALL_EMU`).
    pub const TRACED: u64 = (1 << 2) | (1 << 3);
    /// The process may handle its own calls (Syscall User Dispatch).
    pub const USER_DISPATCH: u64 = 1 << 5;
}

/// Key of a live block: an address in one address space. The address space is identified by the process that owns it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct LiveKey {
    /// Owner of the address space (a `vfork` child has its parent's).
    pub space: ProcessKey,
    /// The address that the allocator returned.
    pub address: u64,
}

/// What the kernel side stores about a sampled allocation until its free. It is enough to count the sample even if its
/// record was lost.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct LiveValue {
    /// The sample's id, see [`AllocationRecord::sample`].
    pub sample: u64,
    /// CLOCK_MONOTONIC at the return of the call.
    pub time_ns: u64,
    /// The allocating thread's number of allocation calls so far, including this one.
    pub thread_calls: u64,
    /// Bytes requested.
    pub size_bytes: u64,
    /// Trials that the allocation took.
    pub trials: u64,
    /// Sampling interval R that it was drawn with, in trials; at most 2^26.
    pub interval: u32,
    /// Failed trials of this allocation before the successful one; a draw is below 2^32.
    pub offset: u32,
    /// The thread that allocated.
    pub tid: u32,
    /// Index of the [`Site`].
    pub site: u32,
}

impl LiveValue {
    /// Replaces a sample's id: the block was freed and the free was reported, but the kernel refused to remove the
    /// entry. No sample has this id.
    pub const FREED: u64 = 0;
}

/// Placeholder address of `bpf_session_is_return` in a call instruction. Compilers for BPF cannot call kernel functions
/// by name, so the loader looks up the function's number and patches the instruction.
pub const SESSION_IS_RETURN: u16 = 0x7f01;

/// The licence that the programs declare to the kernel, because they use helpers for GPL-compatible programs only.
pub const LICENSE: &[u8; 13] = b"Dual MIT/GPL\0";

/// Largest plausible stack, bytes. An address further from the stack pointer belongs to something else.
pub const LARGEST_STACK_BYTES: u64 = 64 << 20;

/// Maximum size of a first stack copy if the top of the stack is not known, bytes. Copies up to this size may use all
/// space in the ring.
pub const FIRST_STACK_BYTES: u64 = 64 << 10;
/// A longer copy may take this fraction of the ring's free space.
pub const STACK_SPACE_SHARE: u64 = 8;
/// A copy ends once more pages than this were not in memory: each costs the target about a microsecond.
pub const MOST_MISSING_PAGES: u32 = 64;
/// Maximum size of a stack copy, bytes.
pub const LARGEST_STACK_COPY: u64 = 1 << 20;

/// Maximum number of stacks with an element in the map `OUTER_FRAMES`.
pub const OUTER_STACKS: usize = 1024;
/// Stacks with fewer bytes than this are copied whole: looking up their outer frames would take as long.
pub const FEW_STACK_BYTES: u64 = 4 << 10;

/// Smallest limit for the size of a stack copy, bytes: a page plus one byte. With a page or less, all code for longer
/// copies is dead. The kernel's verifier (6.18) then removes a function although it still finds a call to it: "verifier
/// bug: No program to jit", with a warning in the kernel log.
pub const SMALLEST_STACK_COPY: u64 = (4 << 10) + 1;

/// Bits that select which processes are targets besides those in the `TARGETS` map.
pub mod target_rule {
    /// Every process.
    pub const ALL: u32 = 1;
    /// Processes whose main thread's name matches the pattern.
    pub const COMM: u32 = 2;
    /// Processes in a cgroup or below it.
    pub const CGROUP: u32 = 4;
}

/// Kinds of links, by the processes that they serve. Used in a link's [`Cookie`], and as values of the `TARGETS` map,
/// which say which links count a process's calls. (0 and 4 are other states of threads.)
pub mod link_kind {
    /// Every process that maps the file.
    pub const SHARED: u32 = 1;
    /// One process.
    pub const OWN: u32 = 2;
    /// Every process that maps the file and is listed as announcing its samples, because it has no allocator to hook.
    pub const ANNOUNCED: u32 = 3;
    /// Same as [`SHARED`], for a process that inherited its parent's inline hooks and has not run another program
    /// since.
    pub const INHERITED_HOOKS: u32 = 4;
    /// Same as [`OWN`], for a process whose links are still being made.
    pub const AWAITED: u32 = 5;
}

/// The rings, by their index in the `RINGS` map.
pub mod ring {
    /// Small records: every sample, every free of a sample, every process event.
    pub const EVENTS: u32 = 0;
    /// Stack copies.
    pub const STACKS: u32 = 1;
    /// Process ids (`u32`) of targets that executed a program, if something makes them wait at their entry point.
    pub const EXECS: u32 = 2;
    /// Number of rings.
    pub const COUNT: usize = 3;
}

/// Kernel faults that tests inject, because they are too rare to wait for. A recording has none, and the verifier
/// removes the code for them.
pub mod fault {
    /// Only the first thread gets state.
    pub const NO_THREAD_STATE: u32 = 1;
    /// The kernel refuses to remove entries from the live map.
    pub const REMOVAL_REFUSED: u32 = 2;
}

/// Constants of a recording, patched into the programs' read-only data before they are loaded. The verifier then
/// removes the code that this recording does not need.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Config {
    /// Bits of [`target_rule`].
    pub target_rules: u32,
    /// 1 if children of targets are targets.
    pub follow: u32,
    /// 1 if frees are tracked.
    pub live: u32,
    /// How stacks are captured, one of [`stack_kind`].
    pub stack_kind: u32,
    /// heapbpf's own process id, which is never a target.
    pub self_tgid: u32,
    /// Bits of [`fault`]; 0 except in tests.
    pub faults: u32,
    /// What a trial is, one of `trials::CRITERION_*`.
    pub criterion: u64,
    /// Maximum size of a stack copy, bytes: 0 if stacks are not copied, else [`SMALLEST_STACK_COPY`] to
    /// [`LARGEST_STACK_COPY`].
    pub stack_bytes: u64,
    /// Seed of the draws; 0 for an unpredictable one.
    pub seed: u64,
    /// The daemon is woken when a ring is filled to 1/`wake_share`; 0: never.
    pub wake_share: u64,
    /// cgroup id, for [`target_rule::CGROUP`].
    pub cgroup_id: u64,
    /// Depth of that cgroup below the root.
    pub cgroup_level: u64,
    /// Memory that the host can give to any process, bytes. A larger request fails.
    pub memory_bytes: u64,
    /// Page size of the kernel's page counts, bytes.
    pub page_bytes: u64,
    /// When the recording began (CLOCK_BOOTTIME), ns.
    pub began_ns: u64,
    /// Pattern for [`target_rule::COMM`], NUL-padded; `*` and `?` as in a shell.
    pub comm_pattern: [u8; 16],
    /// Offsets in the kernel's own structures, from its BTF.
    pub offsets: KernelOffsets,
}

/// Byte offsets of members of kernel structures on the running kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
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
    /// `task_struct.thread`, which contains it at an offset that depends on the architecture
    pub task_thread_pointer: u64,
    /// `signal_struct.live`
    pub signal_live: u64,
    /// `mm_struct.owner`; [`KernelOffsets::ABSENT`] if the kernel has no such member
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
    /// `mm_struct.mm_users`
    pub mm_users: u64,
    /// `task_struct.se.sum_exec_runtime`
    pub task_cpu: u64,
    /// `signal_struct.sum_sched_runtime`
    pub signal_cpu: u64,
    /// `task_struct.thread_info.syscall_work`; [`KernelOffsets::ABSENT`] without such a member, or without uretprobe(2)
    pub task_syscall_work: u64,
}

impl KernelOffsets {
    /// The kernel has no such member.
    pub const ABSENT: u64 = u64::MAX;
}

/// Number of elements of the `DRAWS` map. An element does not change while a program may be reading it.
pub const DRAWS: u32 = 256;

/// The single value of the `CONTROL` map: settings that the daemon changes while the programs run. Only the daemon
/// writes it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Control {
    /// Index into the `DRAWS` map of the constants for the current interval. Threads use them from their next draw on.
    /// The index is below [`DRAWS`], so only one of its bytes ever changes, and a program never sees a partial change.
    pub draw: u64,
    /// Incremented when the set of targets changes, so that threads that were not targets are checked again.
    pub targets_generation: u64,
}

/// The single value of the `PROGRESS` map: counts over all threads. Only the programs write it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Progress {
    /// Number of threads with state so far. Each thread gets its ordinal from it.
    pub threads: u64,
    /// Number of threads whose counters have been added to their process's totals.
    pub threads_flushed: u64,
    /// Number of records of allocations, frees and unmappings that did not fit into the events ring.
    pub records_lost: u64,
    /// Number of targets that began and ended during the recording before inline hooks, or links of their own, counted
    /// them.
    pub ended_uncounted: u64,
    /// Total CPU time of these targets, ns.
    pub ended_uncounted_ns: u64,
    /// Total CPU time of those that inline hooks, or links of their own, did count, ns.
    pub ended_counted_ns: u64,
}
