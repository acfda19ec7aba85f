//! Clocks: CLOCK_MONOTONIC, which the BPF programs use as well, and the time that it omits while the machine is suspended.

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

fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one `timespec` to `time`. It cannot fail: both clocks exist on every supported kernel.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    (time.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec as u64)
}
