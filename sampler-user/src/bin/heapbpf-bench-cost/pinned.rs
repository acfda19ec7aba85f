//! The workload's surroundings: a CPU of its own, and a C library of its own that nobody else's probes are in.

use std::process::Command;

use anyhow::Context;
use sampler_user::cost::cpus::pin;
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
