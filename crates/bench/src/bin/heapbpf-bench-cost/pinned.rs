//! Isolation of the workload: a CPU of its own, and a copy of the C library that other tools have no probes in.

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

    /// Starts `pair_loop` with the copy, on another CPU than this program.
    pub fn start(&self, program: &std::path::Path, arguments: &[&str]) -> anyhow::Result<Workload> {
        self.start_with(program, arguments, None)
    }

    /// Does the same with a library that is loaded before all others.
    pub fn start_with(
        &self,
        program: &std::path::Path,
        arguments: &[&str],
        preloaded: Option<&str>,
    ) -> anyhow::Result<Workload> {
        let mut command = Command::new(program);
        command.args(arguments).env("LD_LIBRARY_PATH", self.0.folder());
        command.envs(preloaded.map(|library| ("LD_PRELOAD", library)));
        let workload = Workload::start(&mut command)?;
        pin(workload.pid(), |cpu| cpu != 0);
        Ok(workload)
    }
}
