//! The context that the kernel passes to a program.

use core::ffi::c_void;

use aya_ebpf::bindings::bpf_raw_tracepoint_args;
use aya_ebpf::helpers::generated::bpf_get_attach_cookie;
use sampler_ebpf::abi::Cookie;

/// The cookie of the link for which the program runs.
#[inline(always)]
pub fn cookie(ctx: *mut c_void) -> Cookie {
    // SAFETY: `ctx` is the context that the kernel passed to the program, as the helper expects; the verifier rejects
    // any other pointer.
    Cookie(unsafe { bpf_get_attach_cookie(ctx) })
}

/// An argument of a raw tracepoint.
#[inline(always)]
pub fn argument(ctx: *mut c_void, index: usize) -> u64 {
    // SAFETY: the context of a raw tracepoint is an array of its arguments; the verifier rejects an index outside of
    // it.
    unsafe { *(*ctx.cast::<bpf_raw_tracepoint_args>()).args.as_ptr().add(index) }
}
