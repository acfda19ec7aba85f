//! The maps, and the few reads that every program needs. Sizes here are placeholders where the daemon sets them.

use core::ffi::c_void;
use core::intrinsics::AtomicOrdering;
use core::mem::MaybeUninit;
use core::ptr::{addr_of, from_ref};

use aya_ebpf::bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC};
use aya_ebpf::btf_maps::{Array, HashMap, RingBuf, StackTrace};
use aya_ebpf::helpers::generated::{bpf_probe_read_kernel, bpf_probe_read_user};
use aya_ebpf::macros::btf_map;
use sampler_ebpf::abi::{Control, Counters, FileRanges, LiveKey, LiveValue, ProcessKey, Progress, Site};

use crate::state::ThreadState;
use crate::task_storage::TaskStorage;

/// State of each thread.
#[btf_map]
pub static THREADS: TaskStorage<ThreadState> = TaskStorage::new();
/// Probe sites; a link's cookie has the index.
#[btf_map]
pub static SITES: Array<Site, 8192> = Array::new();
/// Code ranges of each hooked file.
#[btf_map]
pub static FILES: Array<FileRanges, 1024> = Array::new();
/// Tracked live samples.
#[btf_map]
pub static LIVE: HashMap<LiveKey, LiveValue, 1048576, { BPF_F_NO_PREALLOC as usize }> = HashMap::new();
/// Counts of tracked live samples by a hash of their address; the daemon maps it into its memory.
#[btf_map]
pub static FILTER: Array<u32, { sampler_ebpf::filter::SLOTS }, { BPF_F_MMAPABLE as usize }> = Array::new();
/// Totals of processes, from threads that have ended.
#[btf_map]
pub static TOTALS: HashMap<ProcessKey, Counters, 65536, { BPF_F_NO_PREALLOC as usize }> = HashMap::new();
/// Target processes, where they are listed.
#[btf_map]
pub static TARGETS: HashMap<u32, u32, 65536, { BPF_F_NO_PREALLOC as usize }> = HashMap::new();
/// Small records: every sample, every free of one, every process event.
#[btf_map]
pub static EVENTS: RingBuf<[u8; 0], 16777216> = RingBuf::new();
/// Stack copies.
#[btf_map]
pub static STACKS: RingBuf<[u8; 0], 67108864> = RingBuf::new();
/// Stacks by the kernel's frame-pointer walk.
#[btf_map]
pub static STACK_TRACES: StackTrace<16384> = StackTrace::new();
/// What the daemon changes at run time.
#[btf_map]
pub static CONTROL: Array<Control, 1> = Array::new();
/// What the programs count over all threads.
#[btf_map]
pub static PROGRESS: Array<Progress, 1> = Array::new();
/// 1 while the daemon sleeps: the next event wakes it.
#[btf_map]
pub static SLEEP: Array<u32, 1> = Array::new();
/// Trials per allocation of each size class, for that criterion.
#[btf_map]
pub static TRIALS: Array<u64, { sampler_ebpf::trials::SIZE_CLASSES }> = Array::new();
/// Counters of hits that no thread state could count.
#[btf_map]
pub static UNATTRIBUTED: Array<Counters, 1> = Array::new();

/// A map as the helpers want it.
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

/// Adds to a counter that several CPUs may add to.
#[inline(always)]
pub fn add_shared(counter: *mut u64, n: u64) {
    // SAFETY: an aligned u64 inside a map value. (The library's atomic types cannot add on this target.)
    unsafe { core::intrinsics::atomic_xadd::<u64, u64, { AtomicOrdering::Relaxed }>(counter, n) };
}

/// Adds one to a counter that several CPUs may add to, and returns what it was.
///
/// The ordering matters: for a relaxed addition the compiler emits the instruction that returns nothing, even if the
/// result is used.
#[inline(always)]
pub fn take_number(counter: *mut u64) -> u64 {
    // SAFETY: as above.
    unsafe { core::intrinsics::atomic_xadd::<u64, u64, { AtomicOrdering::SeqCst }>(counter, 1) }
}

/// Trials of an allocation of a size class.
#[inline(always)]
pub fn trials_of_class(class: usize) -> u64 {
    TRIALS.get(class as u32).map_or(1, |trials| *trials)
}

/// Counts a hit for which the kernel had no state.
#[inline(always)]
pub fn count_no_thread_state() {
    if let Some(counters) = UNATTRIBUTED.get_ptr_mut(0) {
        // SAFETY: a field of a map value.
        add_shared(unsafe { &raw mut (*counters).lost_no_thread_state }, 1);
    }
}

/// Reads from the target's memory; `None` if it is not mapped (or not resident).
#[inline(always)]
pub fn read_user<T: Copy>(address: u64) -> Option<T> {
    let mut value = MaybeUninit::<T>::uninit();
    // SAFETY: the helper writes `size_of::<T>()` bytes, or zeros them on failure.
    let status =
        unsafe { bpf_probe_read_user(value.as_mut_ptr().cast(), size_of::<T>() as u32, address as *const c_void) };
    // SAFETY: initialised by the helper.
    (status == 0).then(|| unsafe { value.assume_init() })
}

/// Reads from kernel memory; zeros if it fails.
#[inline(always)]
pub fn read_kernel<T: Copy>(address: u64) -> T {
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: the helper writes `size_of::<T>()` bytes and zeros them on failure; only used with plain integers.
    unsafe {
        bpf_probe_read_kernel(value.as_mut_ptr().cast(), size_of::<T>() as u32, address as *const c_void);
        value.assume_init()
    }
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
