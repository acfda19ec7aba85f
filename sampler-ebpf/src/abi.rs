//! The data that crosses between kernel and daemon: map keys, map values, ring-buffer records.
//!
//! Every type is `#[repr(C)]`, holds plain integers only and has no padding that is not a named field.

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

/// What the kernel keeps of a sampled allocation until its free.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LiveValue {
    /// The sample's id, see [`AllocationRecord::sample`].
    pub sample: u64,
    /// The allocating thread's number of allocation calls so far (this one included).
    pub thread_calls: u64,
    /// Thread that allocated.
    pub tid: u32,
    /// Zero.
    pub reserved: u32,
}

/// Where a probe sits and how to read the call there. Its index in the `SITES` map is in the link's cookie.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Site {
    /// File offset of the probed instruction.
    pub offset: u64,
    /// First file offset of the code of hooked functions in this file (bounding range).
    pub inner_start: u64,
    /// End of that range; equal to `inner_start` if there is none.
    pub inner_end: u64,
    /// Index into the `FILES` map, where the exact ranges are.
    pub file: u32,
    /// Row of the allocator table that names the function; opaque to the kernel side.
    pub function: u16,
    /// Argument that holds the size, see [`NO_ARGUMENT`].
    pub size_argument: u8,
    /// Argument that the size is multiplied by (calloc), or [`NO_ARGUMENT`].
    pub times_argument: u8,
    /// Argument that holds the block to be freed or reallocated, or [`NO_ARGUMENT`].
    pub old_argument: u8,
    /// Argument that points to where the result is stored (posix_memalign), or [`NO_ARGUMENT`]: returned.
    pub out_argument: u8,
    /// `SITE_*` bits.
    pub flags: u8,
    /// Zero.
    pub reserved: [u8; 29],
}

impl Site {
    /// The cookie of its links, if its index is this.
    #[must_use]
    pub const fn cookie(&self, index: u32) -> Cookie {
        Cookie(
            index as u64
                | (self.size_argument as u64) << 32
                | (self.times_argument as u64) << 40
                | (self.old_argument as u64) << 48
                | (self.flags as u64) << 56,
        )
    }
}

/// A link's cookie: where its [`Site`] is, and what an unsampled call needs to know of it, which spares it the look-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cookie(pub u64);

impl Cookie {
    /// Index into the `SITES` map.
    #[inline(always)]
    #[must_use]
    pub const fn index(self) -> u32 {
        self.0 as u32
    }

    /// [`Site::size_argument`].
    #[inline(always)]
    #[must_use]
    pub const fn size_argument(self) -> u8 {
        (self.0 >> 32) as u8
    }

    /// [`Site::times_argument`].
    #[inline(always)]
    #[must_use]
    pub const fn times_argument(self) -> u8 {
        (self.0 >> 40) as u8
    }

    /// [`Site::old_argument`].
    #[inline(always)]
    #[must_use]
    pub const fn old_argument(self) -> u8 {
        (self.0 >> 48) as u8
    }

    /// [`Site::flags`].
    #[inline(always)]
    #[must_use]
    pub const fn flags(self) -> u8 {
        (self.0 >> 56) as u8
    }

    /// All but the index: the same for all functions that are called alike.
    #[inline(always)]
    #[must_use]
    pub const fn shape(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// [`Cookie::shape`] of malloc and operator new: the size is the first argument, and nothing else matters.
pub const SHAPE_MALLOC: u32 = Site { size_argument: 0, ..PLAIN }.cookie(0).shape();
/// [`Cookie::shape`] of calloc: the size is the product of the first two arguments.
pub const SHAPE_CALLOC: u32 = Site { size_argument: 1, times_argument: 0, ..PLAIN }.cookie(0).shape();

const PLAIN: Site = Site {
    offset: 0,
    inner_start: 0,
    inner_end: 0,
    file: 0,
    function: 0,
    size_argument: NO_ARGUMENT,
    times_argument: NO_ARGUMENT,
    old_argument: NO_ARGUMENT,
    out_argument: NO_ARGUMENT,
    flags: 0,
    reserved: [0; 29],
};

/// No such argument.
pub const NO_ARGUMENT: u8 = 0xff;
/// Arguments in registers that a [`Site`] can name: 0 to 5.
pub const ARGUMENTS: u8 = 6;
/// In place of an argument's number: x86-64's `rax`, where a copy of one or their product may be. Not on aarch64.
pub const ACCUMULATOR: u8 = ARGUMENTS;
/// `realloc(p, 0)` frees `p` (glibc) instead of returning a minimal block (musl).
pub const SITE_ZERO_FREES: u8 = 1;
/// The function can end in a jump to another hooked function (glibc: `realloc(NULL, n)` jumps to malloc).
pub const SITE_MAY_TAIL_JUMP: u8 = 2;
/// The function only frees.
pub const SITE_FREES: u8 = 4;
/// The function may get its memory from another allocator, whose calls are then inner ones: its return is awaited, and
/// what the thread allocates until then is not counted.
pub const SITE_CALLS_OUT: u8 = 8;
/// Code of the file that the function runs may call a hooked function (glibc: memalign's helper calls malloc).
pub const SITE_MAY_CALL_INSIDE: u8 = 16;
/// The function throws an exception where others return NULL. The unwinder of the program cannot find its way past a return
/// that is awaited: it would end the program.
pub const SITE_THROWS: u8 = 32;
/// The function can end in a jump to another that takes the old block over (reallocarray jumps to realloc). Without this
/// flag, one that was given a block cannot end in a jump: the block would be lost.
pub const SITE_PASSES_BLOCK_ON: u8 = 64;
/// The function may throw at any time: probes on its return instructions see its end, so that the way of an exception stays
/// open. x86-64 only.
pub const SITE_ENDS_PROBED: u8 = 128;

/// Most exact code ranges of hooked functions in one file.
pub const MAX_INNER_RANGES: usize = 32;

/// Code ranges of one file (file offsets) whose allocator calls are inner ones: of the hooked functions themselves.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileRanges {
    /// Used entries of `ranges`.
    pub count: u64,
    /// `[start, end)` pairs.
    pub ranges: [[u64; 2]; MAX_INNER_RANGES],
}

impl Default for FileRanges {
    fn default() -> Self {
        Self { count: 0, ranges: [[0; 2]; MAX_INNER_RANGES] }
    }
}

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

/// What stands in place of a [`Site`]'s index in records of mappings that a program made itself (`--mmap`).
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
    /// Index of the [`Site`].
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
    /// CLOCK_MONOTONIC at the entry of free.
    pub time_ns: u64,
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

/// Counters of a thread (kernel side), of a process, and of the whole recording.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Outermost allocation calls that were not sampled.
    pub unsampled: u64,
    /// Bytes they asked for.
    pub unsampled_bytes: u64,
    /// Calls of hooked functions that free, of a block that is not NULL, by whomever: an allocator's own (tcmalloc's realloc
    /// frees the old block) as well as the program's.
    pub frees_seen: u64,
    /// Frees of tracked samples.
    pub frees_matched: u64,
    /// Calls an allocator made into itself.
    pub inner: u64,
    /// Outermost allocation calls that were sampled.
    pub sampled: u64,
    /// Bytes that sampled calls asked for, those seen to fail taken back.
    pub sampled_bytes: u64,
    /// Unsampled calls that were seen to fail all the same (a realloc of a tracked block).
    pub unsampled_failed: u64,
    /// Sampled, and reported.
    pub submitted: u64,
    /// Sampled, but the call returned NULL; or refused without a trial, for a size no allocator can give.
    pub failed: u64,
    /// Sampled, lost: the events ring was full.
    pub lost_ring_full: u64,
    /// Sampled, lost: the call never returned (longjmp, an exception, the thread's end).
    pub lost_abandoned: u64,
    /// Sampled, lost: still inside the allocator when the probes were taken away.
    pub lost_in_flight: u64,
    /// Hit, lost: the kernel had no state for the thread.
    pub lost_no_thread_state: u64,
    /// Sampled, lost: the result could not be read (posix_memalign's pointer).
    pub lost_result_unreadable: u64,
    /// Reported samples that could not be followed to their free: the live map was full.
    pub untracked: u64,
    /// Frees of tracked samples that were not reported: the events ring was full (healed at a snapshot).
    pub frees_lost: u64,
    /// Reported samples whose stack did not fit into the stacks ring, or could not be taken.
    pub stacks_lost: u64,
    /// Process events (fork, exec, exit) that did not fit into the events ring.
    pub process_events_lost: u64,
    /// Reported samples whose address was still tracked: a free was missed.
    pub stale_replaced: u64,
    /// Threads that these counters were added up over (ended ones, in a process's totals).
    pub threads: u64,
}

impl Counters {
    /// Outermost allocation calls: the left side of the accounting identity.
    #[must_use]
    pub const fn hits(&self) -> u64 {
        self.unsampled + self.sampled + self.lost_no_thread_state
    }

    /// Adds another set of counters.
    pub fn add(&mut self, other: &Self) {
        for (sum, value) in self.as_mut_array().iter_mut().zip(other.as_array()) {
            *sum = sum.wrapping_add(*value);
        }
    }

    /// All counters in declaration order.
    #[must_use]
    pub const fn as_array(&self) -> &[u64; COUNTERS] {
        // SAFETY: `repr(C)` with `COUNTERS` fields of type u64 (checked at compile time below) is laid out as the array.
        unsafe { &*core::ptr::from_ref(self).cast() }
    }

    /// All counters in declaration order, to be changed.
    pub const fn as_mut_array(&mut self) -> &mut [u64; COUNTERS] {
        // SAFETY: as in `as_array`.
        unsafe { &mut *core::ptr::from_mut(self).cast() }
    }
}

/// Number of counters in [`Counters`].
pub const COUNTERS: usize = size_of::<Counters>() / size_of::<u64>();

/// What the thread iterator writes for each thread with state.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadRecord {
    /// Process of the thread.
    pub process: ProcessKey,
    /// Thread id.
    pub tid: u32,
    /// Zero.
    pub reserved: u32,
    /// The thread's counters; calls in flight are in `lost_in_flight`.
    pub counters: Counters,
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
}
