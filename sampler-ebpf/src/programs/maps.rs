//! The maps. Where the daemon sets a size, the one here is a placeholder.

use core::ffi::c_void;
use core::ptr::{addr_of, from_ref};

use aya_ebpf::bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC};
use aya_ebpf::btf_maps::{Array, HashMap, RingBuf, StackTrace};
use aya_ebpf::macros::btf_map;
use sampler_ebpf::abi::{Control, Counters, FileRanges, LiveKey, LiveValue, ProcessKey, Progress, Site};

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
/// Small records: every sample, every free of a sample, every process event.
#[btf_map]
pub static EVENTS: RingBuf<[u8; 0], 16777216> = RingBuf::new();
/// Stack copies.
#[btf_map]
pub static STACKS: RingBuf<[u8; 0], 67108864> = RingBuf::new();
/// Stacks taken by the kernel's frame-pointer walk.
#[btf_map]
pub static STACK_TRACES: StackTrace<16384> = StackTrace::new();
/// Most bytes of stack copied by a process where the top of the stack is not known, if that is not
/// [`FIRST_STACK_BYTES`](sampler_ebpf::abi::FIRST_STACK_BYTES). The daemon sets it by what was cut.
#[btf_map]
pub static STACK_LIMITS: HashMap<ProcessKey, u64, 4096, { BPF_F_NO_PREALLOC as usize }> = HashMap::new();
/// The control map: settings that the daemon changes at run time.
#[btf_map]
pub static CONTROL: Array<Control, 1> = Array::new();
/// Counts over all threads, written by the programs.
#[btf_map]
pub static PROGRESS: Array<Progress, 1> = Array::new();
/// 1 while the daemon sleeps; the next event wakes it.
#[btf_map]
pub static SLEEP: Array<u32, 1> = Array::new();
/// Trials per allocation of each size class, for the size-class criterion.
#[btf_map]
pub static TRIALS: Array<u64, { sampler_ebpf::trials::SIZE_CLASSES }> = Array::new();
/// Runs of the program that is linked to try out links.
#[btf_map]
pub static TRIAL_RUNS: Array<u64, 1> = Array::new();
/// Counters of hits that could not be counted in a thread's state.
#[btf_map]
pub static UNATTRIBUTED: Array<Counters, 1> = Array::new();

/// A pointer to a map, as the helpers expect it.
#[inline(always)]
pub fn handle<T>(map: &'static T) -> *mut c_void {
    from_ref(map).cast_mut().cast()
}

/// The single value of `CONTROL`.
#[inline(always)]
pub fn control() -> Option<&'static Control> {
    CONTROL.get(0)
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

/// Address of the events ring, for the helpers.
#[inline(always)]
pub fn events() -> *mut c_void {
    addr_of!(EVENTS).cast_mut().cast()
}

/// Address of the stacks ring, for the helpers.
#[inline(always)]
pub fn stacks() -> *mut c_void {
    addr_of!(STACKS).cast_mut().cast()
}
