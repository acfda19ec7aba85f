//! CPUs of a measurement: the workload's are kept apart from those of whoever measures it.

/// Keeps a process (0: this one) on the CPUs for which `wanted` holds. On a machine with one CPU it does nothing.
pub fn pin(pid: u32, wanted: impl Fn(usize) -> bool) {
    let cpus = online();
    if cpus < 2 {
        return;
    }
    // SAFETY: a set of bits, all zeros is a value.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for cpu in (0..cpus.min(8 * size_of_val(&set))).filter(|cpu| wanted(*cpu)) {
        // SAFETY: `set` has a bit for each of these.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: `set` is initialised. A failure leaves the process where it was: noisier, not wrong.
    unsafe { libc::sched_setaffinity(pid.cast_signed(), size_of_val(&set), &raw const set) };
}

/// CPUs of the machine, those included that this process keeps away from.
pub fn online() -> usize {
    // SAFETY: no preconditions.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).unwrap_or(1)
}
