//! What follows forks, execs and ends, of which it misses none without saying so.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use super::loader::{Loader, ProgramKind, Wanted};
use super::tracepoints::TracepointProgram;
use super::{KernelError, sys};

const FORK: (&str, &str) = ("process_fork", "sched_process_fork");
const EXEC: (&str, &str) = ("process_exec", "sched_process_exec");
const EXIT: (&str, &str) = ("process_exit", "sched_process_exit");

/// The linked programs.
pub struct Lifecycle {
    fork: TracepointProgram,
    exec: TracepointProgram,
    pub(super) exit: TracepointProgram,
    threads_freed: Option<ThreadsFreed>,
    inline_ends: Vec<TracepointProgram>,
}

/// Runs of the programs that the kernel skipped, at most ([`TracepointProgram`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    /// All of them. What each would have told is found in the kernel's list of processes, if it is of a process.
    pub runs: u64,
    /// Those for which nothing keeps what was counted, or follows what was started.
    pub lost: u64,
}

impl Lifecycle {
    /// The programs that [`Self::link`] loads.
    pub(super) fn wanted() -> impl Iterator<Item = Wanted> {
        let programs = [FORK, EXEC, EXIT].map(|(name, _)| (name, ProgramKind::RawTracepoint));
        programs.into_iter().chain([ThreadsFreed::PROGRAM])
    }

    /// Loads and links the programs.
    ///
    /// # Errors
    /// The kernel refuses a program.
    pub(super) fn link(loader: &Loader) -> Result<Self, KernelError> {
        let link = |(name, tracepoint)| TracepointProgram::link(loader, name, tracepoint);
        let (fork, exec, exit) = (link(FORK)?, link(EXEC)?, link(EXIT)?);
        Ok(Self { fork, exec, exit, threads_freed: ThreadsFreed::link(loader), inline_ends: Vec::new() })
    }

    /// Keeps what reads counts of processes with inline hooks linked, for as long as the other programs are.
    pub fn hold_inline_ends(&mut self, ends: Vec<TracepointProgram>) {
        self.inline_ends = ends;
    }

    /// How many runs of the programs the kernel has skipped so far.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn skipped(&self) -> Result<Skipped, KernelError> {
        let read = || -> io::Result<Skipped> {
            let others = [&self.fork, &self.exec].into_iter().chain(&self.inline_ends);
            let others = others.map(TracepointProgram::runs_skipped).sum::<io::Result<u64>>()?;
            let ends = self.exit.runs_skipped()?;
            let lost_ends = self.threads_freed.as_ref().map_or(Ok(ends), ThreadsFreed::runs_skipped)?;
            Ok(Skipped { runs: others + ends, lost: others + lost_ends })
        };
        read().map_err(|source| KernelError::Read { what: "skipped runs", source })
    }

    /// Waits until what threads have counted whose ends were skipped is kept, if there were any.
    pub fn await_skipped_ends(&self) {
        if self.threads_freed.is_some() && self.exit.runs_skipped().is_ok_and(|skipped| skipped > 0) {
            std::thread::sleep(ThreadsFreed::GRACE_PERIOD);
        }
    }
}

/// A program that keeps what threads have counted whose ends were skipped.
struct ThreadsFreed {
    program: OwnedFd,
    _link: OwnedFd,
}

impl ThreadsFreed {
    const PROGRAM: Wanted = ("thread_freed", ProgramKind::ThreadFreed);

    /// How long the kernel takes to give a thread back that has ended: a grace period, which takes some hundredths of a second. A
    /// busy kernel may need longer.
    const GRACE_PERIOD: std::time::Duration = std::time::Duration::from_millis(200);

    /// Links it, where it is needed. Without it, such counts may be missing.
    fn link(loader: &Loader) -> Option<Self> {
        if loader.tracepoint_copies() < 2 {
            return None;
        }
        let refused = |source| KernelError::Link { what: "the tracepoint sched_process_free".into(), source };
        let link = |program: OwnedFd| {
            sys::link_tracing(program.as_fd()).map_err(refused).map(|link| Self { program, _link: link })
        };
        let linked = loader.program(Self::PROGRAM.0, Self::PROGRAM.1).and_then(link);
        linked.inspect_err(|error| log::info!("ends of threads may be missed: {error}")).ok()
    }

    /// The runs that the kernel skipped: it may preempt this program, too, if it is built for real time.
    fn runs_skipped(&self) -> io::Result<u64> {
        sys::runs_skipped(self.program.as_fd())
    }
}
