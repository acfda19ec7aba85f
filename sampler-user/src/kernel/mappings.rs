//! Probes on the system calls mmap, munmap, mremap and brk, for `--mmap`.

use std::os::fd::{AsFd, OwnedFd};

use super::loader::{Loader, ProgramKind};
use super::{KernelError, sys};

/// Tracepoints, and the program of each. They stand in the way of every system call of the host while they are linked.
const TRACEPOINTS: [(&str, &str); 2] = [("sys_enter", "system_call_entry"), ("sys_exit", "system_call_exit")];

/// The loaded programs, linked or not.
pub struct MappingProbes {
    programs: Vec<OwnedFd>,
    links: Vec<OwnedFd>,
}

impl MappingProbes {
    /// Loads the programs; they are not linked yet.
    ///
    /// # Errors
    /// The kernel refuses one.
    pub fn load(loader: &Loader) -> Result<Self, KernelError> {
        let programs = TRACEPOINTS.iter().map(|(_, name)| loader.program(name, ProgramKind::RawTracepoint));
        Ok(Self { programs: programs.collect::<Result<_, _>>()?, links: Vec::new() })
    }

    /// Begins to follow mappings; nothing happens if they are followed already.
    ///
    /// # Errors
    /// The kernel has no such tracepoints (`CONFIG_FTRACE_SYSCALLS`); nothing stays linked then.
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

    /// Follows them no longer.
    pub fn unlink(&mut self) {
        while self.links.pop().is_some() {}
    }
}
