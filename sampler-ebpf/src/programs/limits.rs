//! Which requests will fail: told from the limits that the kernel keeps for the process and the host.

use aya_ebpf::helpers::generated::bpf_get_current_task_btf;

use crate::config::config;
use crate::maps::read_kernel;

/// `RLIMIT_DATA` and `RLIMIT_AS`, by their place in `signal_struct.rlim` (16 bytes each).
const RLIMIT_DATA: u64 = 2 * 16;
const RLIMIT_AS: u64 = 9 * 16;
/// An allocator may map so much more than it was asked for.
const MARGIN: u64 = 16 << 20;

/// Whether memory for a request of so many bytes will most likely be refused.
#[inline(always)]
pub fn refuse(size: u64) -> bool {
    if size >= config!(memory_bytes) {
        return true;
    }
    // SAFETY: no argument.
    let task = unsafe { bpf_get_current_task_btf() } as u64;
    let signal: u64 = read_kernel(task + config!(offsets.task_signal));
    let mm: u64 = read_kernel(task + config!(offsets.task_mm));
    let limits = signal + config!(offsets.signal_rlim);
    exceeds(limits + RLIMIT_AS, mm + config!(offsets.mm_total_vm), size)
        || exceeds(limits + RLIMIT_DATA, mm + config!(offsets.mm_data_vm), size)
}

/// Whether pages in use (a counter at one kernel address) and the request come too near a limit (at another).
#[inline(always)]
fn exceeds(limit: u64, pages: u64, size: u64) -> bool {
    let (limit, pages): (u64, u64) = (read_kernel(limit), read_kernel(pages));
    pages.wrapping_mul(config!(page_bytes)).saturating_add(size).saturating_add(MARGIN) > limit
}
