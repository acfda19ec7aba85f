//! Tracks the mmap, munmap, mremap and brk system calls, for `--mmap`.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use super::lifecycle::least_skipped;
use super::loader::{Loader, ProgramKind};
use super::{KernelError, sys};

/// Tracepoints and the programs for each, in the order in which they run. While they are linked, every system call on
/// the host is slower. The second program is needed where the kernel may skip the first ([`super::lifecycle`]).
const TRACEPOINTS: [(&str, [&str; 2]); 2] = [
    ("sys_enter", ["system_call_entry", "system_call_entry"]),
    ("sys_exit", ["system_call_exit", "again_at_call_exit"]),
];

/// The loaded programs, linked or not.
pub struct MappingProbes {
    /// The programs of each tracepoint.
    programs: [Vec<OwnedFd>; 2],
    links: Vec<OwnedFd>,
}

impl MappingProbes {
    /// Loads the programs without linking them.
    ///
    /// # Errors
    /// The kernel refuses a program.
    pub fn load(loader: &Loader) -> Result<Self, KernelError> {
        let load = |(_, names): (&str, [&'static str; 2])| {
            let needed = names.into_iter().take(loader.tracepoint_copies);
            needed.map(|name| loader.program(name, ProgramKind::RawTracepoint)).collect::<Result<_, _>>()
        };
        let [entry, exit] = TRACEPOINTS.map(load);
        Ok(Self { programs: [entry?, exit?], links: Vec::new() })
    }

    /// Starts tracking mappings. Does nothing if they are already tracked.
    ///
    /// # Errors
    /// The kernel lacks these tracepoints (`CONFIG_FTRACE_SYSCALLS`). In that case nothing stays linked.
    pub fn link(&mut self) -> Result<(), KernelError> {
        if self.links.is_empty() {
            let link = |program: &OwnedFd, tracepoint: &str| {
                sys::open_raw_tracepoint(program.as_fd(), tracepoint).map_err(|source| KernelError::Link {
                    what: format!("the tracepoint {tracepoint} (--mmap needs CONFIG_FTRACE_SYSCALLS)"),
                    source,
                })
            };
            let of_each = self.programs.iter().zip(TRACEPOINTS);
            let links =
                of_each.flat_map(|(programs, (tracepoint, _))| programs.iter().map(move |it| link(it, tracepoint)));
            self.links = links.collect::<Result<_, _>>()?;
        }
        Ok(())
    }

    /// Stops tracking mappings.
    pub fn unlink(&mut self) {
        while self.links.pop().is_some() {}
    }

    /// Maximum number of system calls on the host that may have been missed because the kernel skipped all programs for
    /// them.
    ///
    /// # Errors
    /// The kernel does not report it.
    pub fn runs_skipped(&self) -> Result<u64, KernelError> {
        let skipped = self.programs.iter().map(|programs| least_skipped(programs)).sum::<io::Result<u64>>();
        skipped.map_err(|source| KernelError::Read { what: "skipped runs", source })
    }
}
