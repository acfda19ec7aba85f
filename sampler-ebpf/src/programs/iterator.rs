//! Reads the counters of all living threads for the daemon.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::bpf_seq_write;
use sampler_ebpf::abi::ThreadRecord;

use crate::maps::THREADS;
use crate::thread::{SLOTS, TRACKED};

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

/// Called for each task. Writes a [`ThreadRecord`] for each one that has state.
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
    if state.status != TRACKED {
        return 0;
    }
    let mut record = ThreadRecord {
        process: state.process,
        tid: state.tid,
        reserved: 0,
        counters: state.all_counters(),
        reallocated: [0; SLOTS],
    };
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
    unsafe { bpf_seq_write((*meta).seq.cast(), (&raw const record).cast(), size_of::<ThreadRecord>() as u32) };
    0
}
