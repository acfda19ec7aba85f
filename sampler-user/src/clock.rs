//! Clocks: CLOCK_MONOTONIC, which the BPF programs use as well, the time that it omits while the machine is suspended, and CPU time.

use std::time::Duration;

/// CLOCK_MONOTONIC, nanoseconds: the time base of all records.
#[must_use]
pub fn monotonic_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC)
}

/// CLOCK_BOOTTIME minus CLOCK_MONOTONIC, nanoseconds: how long the machine was suspended.
#[must_use]
pub fn suspended_ns() -> u64 {
    clock_ns(libc::CLOCK_BOOTTIME).saturating_sub(monotonic_ns())
}

/// CPU time of the calling thread, on which the load of the machine has no influence.
#[must_use]
pub fn thread_cpu_time() -> Duration {
    Duration::from_nanos(clock_ns(libc::CLOCK_THREAD_CPUTIME_ID))
}

fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one `timespec` to `time`. It cannot fail: these clocks exist on every supported kernel.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    (time.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec as u64)
}
