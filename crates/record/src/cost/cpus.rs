//! CPU affinity for measurements: the workload and the process that measures it run on different CPUs.

pub use heapbpf_host::side_by_side::online_processors as online;

/// Restricts a process (0: this one) to the CPUs that `wanted` accepts. Does nothing on a machine with one CPU.
pub fn pin(pid: u32, wanted: impl Fn(usize) -> bool) {
    let cpus = online();
    if cpus < 2 {
        return;
    }
    // SAFETY: `cpu_set_t` is an array of integers, for which zero is a valid value: the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for cpu in (0..cpus.min(8 * size_of_val(&set))).filter(|cpu| wanted(*cpu)) {
        // SAFETY: `cpu` is less than the number of bits in `set`.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: `set` is initialised, has the size that is passed, and outlives the call. A failure leaves the affinity
    // unchanged, which makes the measurement noisier but not wrong.
    unsafe { libc::sched_setaffinity(pid.cast_signed(), size_of_val(&set), &raw const set) };
}
