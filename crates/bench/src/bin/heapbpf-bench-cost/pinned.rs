//! Isolates the workload: it gets its own CPU, and a copy of the C library in which no other tool has probes.

use std::process::Command;

use anyhow::Context;
use heapbpf_record::cost::cpus::pin;
use heapbpf_record::cost::library::PrivateLibrary;
use heapbpf_record::cost::workload::Workload;

/// A copy of the C library for the workload.
pub struct Library(PrivateLibrary);

impl Library {
    /// Copies the C library that this program uses.
    pub fn copy() -> anyhow::Result<Self> {
        PrivateLibrary::copy()?.map(Self).context("this program uses no libc.so.6")
    }

    /// Starts `pair_loop` with the copy, on a different CPU from this program.
    pub fn start(&self, program: &std::path::Path, arguments: &[&str]) -> anyhow::Result<Workload> {
        self.start_with(program, arguments, None)
    }

    /// Does the same with a preloaded library.
    pub fn start_with(
        &self,
        program: &std::path::Path,
        arguments: &[&str],
        preloaded: Option<&str>,
    ) -> anyhow::Result<Workload> {
        let mut command = Command::new(program);
        command.args(arguments).env("LD_LIBRARY_PATH", self.0.dir());
        command.envs(preloaded.map(|library| ("LD_PRELOAD", library)));
        let workload = Workload::start(&mut command)?;
        pin(workload.pid(), |cpu| cpu != 0);
        Ok(workload)
    }
}
