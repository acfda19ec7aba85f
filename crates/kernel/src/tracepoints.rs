//! Programs at tracepoints of the scheduler, none of whose runs may be missing.
//!
//! Since Linux 7.0 such a program may be preempted (commits f7d327654b88 and a46023d5616e). If another thread reaches the same
//! tracepoint on the same processor meanwhile, the kernel skips the program for it and counts that. So each program is linked
//! twice there: the second copy finds nothing left to do, unless the first was skipped. Only if a thread was preempted in each
//! of the copies may a run be missing.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use super::loader::{Loader, ProgramKind};
use super::{KernelError, sys};

/// A program that is linked to a tracepoint, as often as it has to be. The programs do the same if they run twice.
pub struct TracepointProgram {
    copies: Vec<OwnedFd>,
    _links: Vec<OwnedFd>,
}

impl TracepointProgram {
    /// Loads a program and links it to a tracepoint, after those that are there.
    ///
    /// # Errors
    /// The kernel refuses the program, or has no such tracepoint.
    pub fn link(loader: &Loader, name: &'static str, tracepoint: &str) -> Result<Self, KernelError> {
        let load = |_| loader.program(name, ProgramKind::RawTracepoint);
        let copies: Vec<OwnedFd> = (0..loader.tracepoint_copies()).map(load).collect::<Result<_, _>>()?;
        let link = |program: &OwnedFd| {
            sys::open_raw_tracepoint(program.as_fd(), tracepoint)
                .map_err(|source| KernelError::Link { what: format!("the tracepoint {tracepoint}"), source })
        };
        let links = copies.iter().map(link).collect::<Result<_, _>>()?;
        Ok(Self { copies, _links: links })
    }

    /// The program.
    pub fn program(&self) -> BorrowedFd<'_> {
        self.copies[0].as_fd()
    }

    /// The most runs that may be missing: those that the kernel skipped of the copy of which it skipped the fewest.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn runs_skipped(&self) -> io::Result<u64> {
        self.copies.iter().try_fold(u64::MAX, |least, copy| Ok(least.min(sys::runs_skipped(copy.as_fd())?)))
    }
}
