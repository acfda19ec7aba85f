//! Keeps programs at uprobes off the processor's private stacks.
//!
//! From Linux 6.13 on the JIT may give a program at a probe a stack of the processor's own (commit a76ab5731e32), because such
//! programs cannot be preempted. Those at uprobes can (commits 8c7dcb84e3b7, 88bf18581375): another thread then runs the same
//! program with the same stack, and the first one goes on with its pointers overwritten, which has crashed kernels. A program
//! that contains a tail call runs on the kernel's stack, where each thread has its own (`check_max_stack_depth`).

use core::ffi::c_void;
use core::ptr;

use aya_ebpf::helpers::generated::bpf_tail_call;

use crate::config::config;

/// Makes the program that it is inlined into contain a tail call. The verifier finds it, and removes it as it is never made.
#[inline(always)]
pub fn use_kernel_stack(ctx: *mut c_void) {
    // No process has this id.
    if config!(self_tgid) == u32::MAX {
        // SAFETY: this is never reached. The verifier would refuse it otherwise, as there is no map.
        unsafe { bpf_tail_call(ctx, ptr::null_mut(), 0) };
    }
}
