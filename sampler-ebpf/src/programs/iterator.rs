//! Reads the counters of all living threads, and the list of living processes, for the daemon.

use core::ffi::c_void;
use core::mem::MaybeUninit;

use aya_ebpf::helpers::generated::bpf_seq_write;
use sampler_ebpf::abi::{KernelOffsets, LivingThread, ThreadRecord};

use crate::config::config;
use crate::maps::THREADS;
use crate::memory::{make_zero, read_kernel};
use crate::process::{cpu_ns, process_of};
use crate::thread::{SLOTS, ThreadState};

/// The first members of the kernel's `bpf_iter_meta`.
#[repr(C)]
struct IteratorMeta {
    seq: *mut c_void,
}

/// The kernel's `bpf_iter__task`.
#[repr(C)]
struct TaskIterator {
    meta: *mut IteratorMeta,
    task: *mut c_void,
}

/// Maximum number of attempts to read a thread's counters between two of its calls.
const ATTEMPTS: u32 = 8;

/// The thread's number of calls now.
#[inline(always)]
fn calls(state: &ThreadState) -> u64 {
    // SAFETY: the pointer is to a field of the state, which is initialised and aligned.
    unsafe { core::ptr::read_volatile(&raw const state.calls) }
}

/// Called for each task. Writes a [`ThreadRecord`] for each thread with state.
#[unsafe(no_mangle)]
#[unsafe(link_section = "iter/task")]
pub extern "C" fn read_threads(ctx: *mut c_void) -> u32 {
    let ctx = ctx.cast::<TaskIterator>();
    // SAFETY: the kernel passes a `bpf_iter__task` to task iterators, and these are its first two members.
    let (meta, task) = unsafe { ((*ctx).meta, (*ctx).task) };
    if task.is_null() {
        return 0;
    }
    // SAFETY: `task` is the kernel's own pointer to a task, and not null.
    let Some(state) = (unsafe { THREADS.of(task) }) else { return 0 };
    if !state.is_tracked() {
        return 0;
    }
    let in_flight = state.pending;
    let mut record = MaybeUninit::<ThreadRecord>::uninit();
    // SAFETY: a record consists of words, which may be zero.
    let record = unsafe {
        make_zero(record.as_mut_ptr());
        record.assume_init_mut()
    };
    record.process = state.process;
    record.tid = state.tid;
    record.in_flight = in_flight;
    // A running thread may make calls while its counters are read. They are then read again, so that all are of the
    // same moment.
    let mut attempts = 0;
    while attempts < ATTEMPTS {
        attempts += 1;
        let before = calls(state);
        state.copy_counters(&mut record.counters);
        if record.counters.calls == before {
            break;
        }
    }
    record.counters.threads = 1;
    let mut i = 0;
    while i < SLOTS {
        let call = &state.slots[i];
        if state.pending & (1 << i) != 0 && call.old_address != 0 && call.return_sites_probed == 0 {
            record.reallocated[i] = call.old.sample;
        }
        i += 1;
    }
    // SAFETY: `meta` and its `seq` are the kernel's own pointers. The helper reads the bytes of the record, which are
    // all initialised because it has no padding.
    unsafe { bpf_seq_write((*meta).seq.cast(), (&raw const *record).cast(), size_of::<ThreadRecord>() as u32) };
    0
}

/// Called for each task. Writes a [`LivingThread`] for each thread whose process has not ended. When a thread other
/// than the first calls exec, it takes over the first one's id; one of the two is always found.
#[unsafe(no_mangle)]
#[unsafe(link_section = "iter/task")]
pub extern "C" fn read_processes(ctx: *mut c_void) -> u32 {
    let ctx = ctx.cast::<TaskIterator>();
    // SAFETY: the kernel passes a `bpf_iter__task` to task iterators, and these are its first two members.
    let (meta, task) = unsafe { ((*ctx).meta, (*ctx).task) };
    if task.is_null() {
        return 0;
    }
    let task = task as u64;
    let signal: u64 = read_kernel(task + config!(offsets.task_signal));
    let live: u32 = read_kernel(signal + config!(offsets.signal_live));
    if live == 0 {
        return 0;
    }
    let memory: u64 = read_kernel(task + config!(offsets.task_mm));
    let memory_users = if memory == 0 { 0 } else { read_kernel::<u32>(memory + config!(offsets.mm_users)).into() };
    let work_offset = config!(offsets.task_syscall_work);
    let syscall_work = if work_offset == KernelOffsets::ABSENT { 0 } else { read_kernel::<u64>(task + work_offset) };
    let thread = LivingThread { process: process_of(task), memory_users, cpu_ns: cpu_ns(task, signal), syscall_work };
    // SAFETY: `meta` and its `seq` are the kernel's own pointers. The helper reads the bytes of the record, which are
    // all initialised because it has no padding.
    unsafe { bpf_seq_write((*meta).seq.cast(), (&raw const thread).cast(), size_of::<LivingThread>() as u32) };
    0
}
