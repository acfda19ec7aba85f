//! Predicts which requests will fail, from the kernel's limits for the process and the host.

use crate::config::config;
use crate::memory::read_kernel;
use crate::process::current_task;

/// `RLIMIT_DATA` and `RLIMIT_AS`, as indices into `signal_struct.rlim` (16 bytes each).
const RLIMIT_DATA: u64 = 2 * 16;
const RLIMIT_AS: u64 = 9 * 16;
/// Number of bytes that an allocator may map in addition to the request.
const MARGIN: u64 = 16 << 20;

/// Whether a request of this many bytes will most likely be refused.
#[inline(always)]
pub fn refuse(size: u64) -> bool {
    if size >= config!(memory_bytes) {
        return true;
    }
    let task = current_task();
    let signal: u64 = read_kernel(task + config!(offsets.task_signal));
    let mm: u64 = read_kernel(task + config!(offsets.task_mm));
    let limits = signal + config!(offsets.signal_rlim);
    exceeds(limits + RLIMIT_AS, mm + config!(offsets.mm_total_vm), size)
        || exceeds(limits + RLIMIT_DATA, mm + config!(offsets.mm_data_vm), size)
}

/// Whether the pages in use (a counter at one kernel address) plus the request come too close to a limit (at another).
#[inline(always)]
fn exceeds(limit: u64, pages: u64, size: u64) -> bool {
    let (limit, pages): (u64, u64) = (read_kernel(limit), read_kernel(pages));
    pages.wrapping_mul(config!(page_bytes)).saturating_add(size).saturating_add(MARGIN) > limit
}
