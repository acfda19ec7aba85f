//! Keeps programs at uprobes off the private stacks of the CPUs.
//!
//! From Linux 6.13 on, the JIT may give a program at a probe a per-CPU stack (commit a76ab5731e32), because such
//! programs cannot be preempted. Programs at uprobes can be, however (commits 8c7dcb84e3b7, 88bf18581375): another
//! thread then runs the same program on the same stack, and the first one continues with overwritten pointers. This has
//! crashed kernels. A program that contains a tail call runs on the kernel's stack, where each thread has its own
//! (`check_max_stack_depth`).

use core::ffi::c_void;
use core::ptr;

use aya_ebpf::helpers::generated::bpf_tail_call;

use crate::config::config;

/// Makes the surrounding program contain a tail call. The verifier finds it, and then removes it because it is never
/// reached.
#[inline(always)]
pub fn use_kernel_stack(ctx: *mut c_void) {
    // No process has this id.
    if config!(self_tgid) == u32::MAX {
        // SAFETY: this is never reached. Otherwise the verifier would refuse it, because there is no map.
        unsafe { bpf_tail_call(ctx, ptr::null_mut(), 0) };
    }
}
