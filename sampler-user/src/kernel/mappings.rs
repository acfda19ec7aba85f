//! Probes on the mmap, munmap, mremap and brk system calls, for `--mmap`.

use std::os::fd::{AsFd, OwnedFd};

use super::loader::{Loader, ProgramKind};
use super::{KernelError, sys};

/// Tracepoints, and the program for each. While they are linked, every system call on the host is slower.
const TRACEPOINTS: [(&str, &str); 2] = [("sys_enter", "system_call_entry"), ("sys_exit", "system_call_exit")];

/// The loaded programs, linked or not.
pub struct MappingProbes {
    programs: Vec<OwnedFd>,
    links: Vec<OwnedFd>,
}

impl MappingProbes {
    /// Loads the programs without linking them.
    ///
    /// # Errors
    /// The kernel refuses a program.
    pub fn load(loader: &Loader) -> Result<Self, KernelError> {
        let programs = TRACEPOINTS.iter().map(|(_, name)| loader.program(name, ProgramKind::RawTracepoint));
        Ok(Self { programs: programs.collect::<Result<_, _>>()?, links: Vec::new() })
    }

    /// Starts to track mappings. Does nothing if they are tracked already.
    ///
    /// # Errors
    /// The kernel lacks these tracepoints (`CONFIG_FTRACE_SYSCALLS`). In that case nothing stays linked.
    pub fn link(&mut self) -> Result<(), KernelError> {
        if self.links.is_empty() {
            let links = self.programs.iter().zip(TRACEPOINTS).map(|(program, (tracepoint, _))| {
                sys::open_raw_tracepoint(program.as_fd(), tracepoint).map_err(|source| KernelError::Link {
                    what: format!("the tracepoint {tracepoint} (--mmap needs CONFIG_FTRACE_SYSCALLS)"),
                    source,
                })
            });
            self.links = links.collect::<Result<_, _>>()?;
        }
        Ok(())
    }

    /// Stops tracking mappings.
    pub fn unlink(&mut self) {
        while self.links.pop().is_some() {}
    }
}
