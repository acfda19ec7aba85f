//! Reads the counters of all living threads for the daemon.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::bpf_seq_write;
use sampler_ebpf::abi::ThreadRecord;

use crate::maps::THREADS;
use crate::pending::SLOTS;
use crate::state::TRACKED;

/// The kernel's `bpf_iter_meta`, as far as needed.
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

/// Called for each task; writes a [`ThreadRecord`] for those with state.
#[unsafe(no_mangle)]
#[unsafe(link_section = "iter/task")]
pub extern "C" fn read_threads(ctx: *mut c_void) -> u32 {
    let ctx = ctx.cast::<TaskIterator>();
    // SAFETY: the context of a task iterator; `task` is NULL at the end.
    let (meta, task) = unsafe { ((*ctx).meta, (*ctx).task) };
    if task.is_null() {
        return 0;
    }
    // SAFETY: the kernel's own pointer.
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
        if state.pending & (1 << i) != 0 && call.old_address != 0 && call.ends_probed == 0 {
            record.reallocated[i] = call.old.sample;
        }
        i += 1;
    }
    // SAFETY: `seq` comes from the kernel, the record is initialised.
    unsafe { bpf_seq_write((*meta).seq.cast(), (&raw const record).cast(), size_of::<ThreadRecord>() as u32) };
    0
}
