//! Processes that die of a fault, which inline hooks may have caused.

use core::ffi::c_void;

use aya_ebpf::bindings::BPF_RB_FORCE_WAKEUP;
use aya_ebpf::helpers::generated::{bpf_get_current_task_btf, bpf_ringbuf_submit, bpf_task_pt_regs};
use sampler_ebpf::abi::{CrashRecord, kind};

use crate::arch::SystemCall;
use crate::context::argument;
use crate::counters::count_process_event_lost;
use crate::inline_counts;
use crate::memory::read_kernel;
use crate::output::{now, reserve, submit};
use crate::process::{current_task, process_of};

/// SIGILL, SIGTRAP, SIGBUS and SIGSEGV, one bit each.
const FAULTS: u32 = 1 << 4 | 1 << 5 | 1 << 7 | 1 << 11;
/// Offset of the field that says how a signal came about: it is not above 0 if a process sent it.
const SI_CODE: u64 = 8;
/// The first field of a signal's action is its handler; this value means that there is none.
const SIG_DFL: u64 = 0;

/// `signal_deliver(signal, information, action)`; runs in the thread that gets the signal.
#[unsafe(no_mangle)]
#[unsafe(link_section = "raw_tp/signal_deliver")]
pub extern "C" fn inline_crash(ctx: *mut c_void) -> u32 {
    let signal = argument(ctx, 0) as u32;
    if signal >= u32::BITS || FAULTS >> signal & 1 == 0 {
        return 0;
    }
    let (code, handler): (i32, u64) = (read_kernel(argument(ctx, 1) + SI_CODE), read_kernel(argument(ctx, 2)));
    if code <= 0 || handler != SIG_DFL {
        return 0;
    }
    // SAFETY: the helpers take the current task, and the result is used only as an integer.
    let registers = unsafe { bpf_task_pt_regs(bpf_get_current_task_btf()) };
    let ip = SystemCall(registers as u64).registers().ip;
    let Some(record) = reserve::<CrashRecord>() else {
        count_process_event_lost();
        return 0;
    };
    let process = process_of(current_task());
    *record = CrashRecord { kind: kind::CRASH, signal, time_ns: now(), process, ip };
    // SAFETY: `record` was reserved above, and is not used afterwards.
    unsafe {
        if inline_counts::counts(process) {
            // Other processes may be about to die of the same fault, so this wakes the daemon.
            bpf_ringbuf_submit(core::ptr::from_mut(record).cast(), u64::from(BPF_RB_FORCE_WAKEUP));
        } else {
            submit(record);
        }
    }
    0
}
