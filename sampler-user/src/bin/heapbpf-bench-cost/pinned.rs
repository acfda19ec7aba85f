//! The workload's surroundings: a CPU of its own, and a C library of its own that nobody else's probes are in.

use std::process::Command;

use anyhow::Context;
use sampler_user::cost::library::PrivateLibrary;
use sampler_user::cost::workload::Workload;

/// The workload's C library.
pub struct Library(PrivateLibrary);

impl Library {
    /// Copies the one that this program uses.
    pub fn copy() -> anyhow::Result<Self> {
        PrivateLibrary::copy()?.map(Self).context("this program uses no libc.so.6")
    }

    /// Starts `pair_loop` with it, away from this program's CPU.
    pub fn start(&self, program: &std::path::Path, arguments: &[&str]) -> anyhow::Result<Workload> {
        let workload = Workload::start(Command::new(program).args(arguments).env("LD_LIBRARY_PATH", self.0.folder()))?;
        pin(workload.pid(), |cpu| cpu != 0);
        Ok(workload)
    }
}

/// Keeps a process (0: this one) on the CPUs for which `wanted` holds. On a machine with one CPU it does nothing.
pub fn pin(pid: u32, wanted: impl Fn(usize) -> bool) {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    if cpus < 2 {
        return;
    }
    // SAFETY: a set of bits, all zeros is a value.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for cpu in (0..cpus).filter(|cpu| wanted(*cpu)) {
        // SAFETY: `set` has room for more CPUs than there are.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: `set` is initialised. A failure leaves the process where it was: noisier, not wrong.
    unsafe { libc::sched_setaffinity(pid.cast_signed(), size_of_val(&set), &raw const set) };
}
