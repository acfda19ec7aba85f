//! The maps. Sizes that the daemon sets are placeholders here.

use core::ffi::c_void;
use core::ptr::from_ref;

use aya_ebpf::bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC};
use aya_ebpf::btf_maps::{Array, HashMap, StackTrace};
use aya_ebpf::macros::btf_map;
use sampler_ebpf::abi;
use sampler_ebpf::abi::inline::InlineProcess;
use sampler_ebpf::abi::{
    Control, Counters, FileRanges, LiveKey, LiveValue, OuterFrames, ProcessKey, Progress, PythonProcess, Site, StackKey,
};
use sampler_ebpf::geometric::DrawConstants;

use crate::ring_array::{Ring, RingArray};
use crate::task_storage::TaskStorage;
use crate::thread::ThreadState;

/// The state of each thread.
#[btf_map]
pub static THREADS: TaskStorage<ThreadState> = TaskStorage::new();
/// Probe sites. A link's cookie contains the index.
#[btf_map]
pub static SITES: Array<Site, 8192> = Array::new();
/// Code ranges of the hooked functions in each file.
#[btf_map]
pub static FILES: Array<FileRanges, 1024> = Array::new();
/// Tracked live samples.
#[btf_map]
pub static LIVE: HashMap<LiveKey, LiveValue, 1048576, { BPF_F_NO_PREALLOC as usize }> = HashMap::new();
/// Counts of tracked live samples by a hash of their address. The daemon maps this into its memory.
#[btf_map]
pub static FILTER: Array<u32, { sampler_ebpf::filter::SLOTS }, { BPF_F_MMAPABLE as usize }> = Array::new();
/// Totals of each process, from its exited threads.
#[btf_map]
pub static TOTALS: HashMap<ProcessKey, Counters, 65536, { BPF_F_NO_PREALLOC as usize }> = HashMap::new();
/// Target processes, if they are listed.
#[btf_map]
pub static TARGETS: HashMap<u32, u32, 65536, { BPF_F_NO_PREALLOC as usize }> = HashMap::new();
/// Processes that inline hooks count.
#[btf_map]
pub static INLINE: HashMap<ProcessKey, InlineProcess, 16384, { BPF_F_NO_PREALLOC as usize }> = HashMap::new();
/// The current rings for records, by [`abi::ring`]. When one fills up, the daemon replaces it with a larger one.
#[btf_map]
pub static RINGS: RingArray<{ abi::ring::COUNT }> = RingArray::new();
/// Stacks taken by the kernel's frame-pointer walk.
#[btf_map]
pub static STACK_TRACES: StackTrace<16384> = StackTrace::new();
/// Maximum size of a process's stack copies if the top of the stack is not known, and if it is not
/// [`FIRST_STACK_BYTES`](sampler_ebpf::abi::FIRST_STACK_BYTES), bytes. The daemon sets it according to which copies
/// were cut.
#[btf_map]
pub static STACK_LIMITS: HashMap<ProcessKey, u64, 4096, { BPF_F_NO_PREALLOC as usize }> = HashMap::new();
/// The parts to copy of a thread's outer frames, for stacks whose outer frames stay the same all the time.
#[btf_map]
pub static OUTER_FRAMES: HashMap<StackKey, OuterFrames, { abi::OUTER_STACKS }, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();
/// Where the interpreters of Python processes store their frames, by process id.
#[btf_map]
pub static PYTHON: HashMap<u32, PythonProcess, 8192, { BPF_F_NO_PREALLOC as usize }> = HashMap::new();
/// Marks of Python code objects that have been reported.
#[btf_map]
pub static PYTHON_CODES: Array<u64, { abi::PYTHON_CODES as usize }> = Array::new();
/// The control map: settings that the daemon changes at run time.
#[btf_map]
pub static CONTROL: Array<Control, 1> = Array::new();
/// Constants of the geometric draw, for each interval used so far.
#[btf_map]
pub static DRAWS: Array<DrawConstants, { abi::DRAWS as usize }> = Array::new();
/// Counts over all threads, written by the programs.
#[btf_map]
pub static PROGRESS: Array<Progress, 1> = Array::new();
/// 1 while the daemon sleeps. The next event then wakes it.
#[btf_map]
pub static SLEEP: Array<u32, 1> = Array::new();
/// Trials per allocation of each size class, for the size-class criterion.
#[btf_map]
pub static TRIALS: Array<u64, { sampler_ebpf::trials::SIZE_CLASSES }> = Array::new();
/// Number of runs of the program that is linked to test links.
#[btf_map]
pub static TRIAL_RUNS: Array<u64, 1> = Array::new();
/// Counters of hits that could not be counted in a thread's state.
#[btf_map]
pub static UNATTRIBUTED: Array<Counters, 1> = Array::new();

/// Returns a pointer to a map, as the helpers expect it.
#[inline(always)]
pub fn handle<T>(map: &'static T) -> *mut c_void {
    from_ref(map).cast_mut().cast()
}

/// The single value of `CONTROL`.
#[inline(always)]
pub fn control() -> Option<&'static Control> {
    CONTROL.get(0)
}

/// Constants of the geometric draw for the current interval.
#[inline(always)]
pub fn draw_constants() -> Option<&'static DrawConstants> {
    DRAWS.get(control()?.draw as u32)
}

/// The single value of `PROGRESS`.
#[inline(always)]
pub fn progress() -> Option<*mut Progress> {
    PROGRESS.get_ptr_mut(0)
}

/// Trials of an allocation of a size class.
#[inline(always)]
pub fn trials_of_class(class: usize) -> u64 {
    TRIALS.get(class as u32).map_or(1, |trials| *trials)
}

/// The ring for small records.
#[inline(always)]
pub fn events() -> Option<Ring> {
    RINGS.get(abi::ring::EVENTS)
}

/// The ring for execs of targets, if something waits for them.
#[inline(always)]
pub fn execs() -> Option<Ring> {
    RINGS.get(abi::ring::EXECS)
}

/// The ring for stack copies.
#[inline(always)]
pub fn stacks() -> Option<Ring> {
    RINGS.get(abi::ring::STACKS)
}
