//! Programs at tracepoints of the scheduler, for which no run may be missed.
//!
//! Since Linux 7.0 such a program may be preempted (commits f7d327654b88 and a46023d5616e). If another thread then
//! reaches the same tracepoint on the same CPU, the kernel skips the program for it and counts the skip. So each
//! program is linked twice there. The second copy finds nothing left to do, unless the first was skipped. A run can be
//! missed only if a thread was preempted in each of the copies.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use super::loader::{Loader, ProgramKind};
use super::{KernelError, sys};

/// A program that is linked to a tracepoint as often as needed. Running such a program twice has the same effect as
/// running it once.
pub struct TracepointProgram {
    copies: Vec<OwnedFd>,
    _links: Vec<OwnedFd>,
}

impl TracepointProgram {
    /// Loads a program and links it to a tracepoint, after those that are already linked.
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

    /// Maximum number of runs that may be missing: the number of skips of the copy that was skipped least.
    ///
    /// # Errors
    /// The kernel does not report it.
    pub fn runs_skipped(&self) -> io::Result<u64> {
        self.copies.iter().try_fold(u64::MAX, |least, copy| Ok(least.min(sys::runs_skipped(copy.as_fd())?)))
    }
}
