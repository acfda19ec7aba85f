//! Clocks: CLOCK_MONOTONIC, which the BPF programs also use; the suspended time that it leaves out; and CPU time.

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

/// CPU time of the calling thread, which does not depend on how busy the machine is.
#[must_use]
pub fn thread_cpu_time() -> Duration {
    Duration::from_nanos(clock_ns(libc::CLOCK_THREAD_CPUTIME_ID))
}

/// CPU seconds that a process has used, including its finished threads, with nanosecond resolution. `None` if it has
/// exited.
pub fn cpu_seconds_of(pid: u32) -> Option<f64> {
    /// `CPUCLOCK_SCHED`: the clock of the time that the scheduler granted (clock_getcpuclockid(3)).
    const SCHEDULED: i32 = 2;
    let clock = (!i32::try_from(pid).ok()? << 3) | SCHEDULED;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a local `timespec` that the call writes to. An unknown clock id makes the call fail.
    let refused = unsafe { libc::clock_gettime(clock, &raw mut time) };
    (refused == 0).then_some(time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9)
}

fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one `timespec` to `time`. It cannot fail: these clocks exist on every supported kernel.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    (time.tv_sec as u64).saturating_mul(1_000_000_000).saturating_add(time.tv_nsec as u64)
}
