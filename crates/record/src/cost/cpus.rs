//! CPU affinity for measurements: the workload and the process that measures it run on different CPUs.

pub use heapbpf_host::side_by_side::online_processors as online;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};

/// Restricts a process (0: this one) to the CPUs that `wanted` accepts. Does nothing on a machine with one CPU.
pub fn pin(pid: u32, wanted: impl Fn(usize) -> bool) {
    let cpus = online();
    if cpus < 2 {
        return;
    }
    let mut set = CpuSet::new();
    (0..cpus.min(CpuSet::MAX_CPU)).filter(|cpu| wanted(*cpu)).for_each(|cpu| set.set(cpu));
    // A failure leaves the affinity unchanged, which makes the measurement noisier but not wrong.
    let _ = sched_setaffinity(Pid::from_raw(pid.cast_signed()), &set);
}
