//! The programs that follow forks, execs and exits. If they may have missed any, that is reported.
//!
//! Since Linux 7.0 a program at a tracepoint of the scheduler may be preempted (commits f7d327654b88 and a46023d5616e).
//! If another thread then reaches the same tracepoint on the same CPU, the kernel skips the program for it and counts
//! the skip. So each program is linked twice there. The second copy finds nothing left to do, unless the first was
//! skipped. A run can be missed only if a thread was preempted in each of the copies.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use super::loader::{Loader, NamedProgram, ProgramKind};
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
    /// The programs that read the counts of processes with inline hooks. They stay linked as long as the others.
    pub inline_ends: Vec<TracepointProgram>,
}

/// Upper bounds on the number of program runs that the kernel skipped ([`TracepointProgram`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    /// All of them. If a skipped run was about a process, the kernel's list of processes shows what it would have
    /// reported.
    pub runs: u64,
    /// Those whose counts nothing else keeps, or whose new process nothing else follows.
    pub lost: u64,
}

impl Lifecycle {
    /// The programs that [`Self::link`] loads.
    pub(super) fn wanted() -> impl Iterator<Item = NamedProgram> {
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

    /// How many program runs the kernel has skipped so far.
    ///
    /// # Errors
    /// The kernel does not report it.
    pub fn skipped(&self) -> Result<Skipped, KernelError> {
        let read = || -> io::Result<Skipped> {
            let others = [&self.fork, &self.exec].into_iter().chain(&self.inline_ends);
            let others = others.map(TracepointProgram::runs_skipped).sum::<io::Result<u64>>()?;
            let ends = self.exit.runs_skipped()?;
            // A real-time kernel may preempt the program that keeps them, too.
            let keeper = self.threads_freed.as_ref();
            let lost_ends = keeper.map_or(Ok(ends), |keeper| sys::runs_skipped(keeper.program.as_fd()))?;
            Ok(Skipped { runs: others + ends, lost: others + lost_ends })
        };
        read().map_err(|source| KernelError::Read { what: "skipped runs", source })
    }

    /// If ends of threads were skipped, waits until the counts of these threads have been kept.
    pub fn await_skipped_ends(&self) {
        if self.threads_freed.is_some() && self.exit.runs_skipped().is_ok_and(|skipped| skipped > 0) {
            std::thread::sleep(ThreadsFreed::GRACE_PERIOD);
        }
    }
}

/// A program that keeps the counts of threads whose ends were skipped.
struct ThreadsFreed {
    program: OwnedFd,
    _link: OwnedFd,
}

impl ThreadsFreed {
    const PROGRAM: NamedProgram = ("thread_freed", ProgramKind::ThreadFreed);

    /// How long the kernel takes to free a thread that has ended: a grace period, some hundredths of a second. A busy
    /// kernel may need longer.
    const GRACE_PERIOD: std::time::Duration = std::time::Duration::from_millis(200);

    /// Links it on kernels where it is needed. Without it, such counts may be missing.
    fn link(loader: &Loader) -> Option<Self> {
        if loader.tracepoint_copies < 2 {
            return None;
        }
        let refused = |source| KernelError::Link { what: "the tracepoint sched_process_free".into(), source };
        let link = |program: OwnedFd| {
            sys::link_tracing(program.as_fd()).map_err(refused).map(|link| Self { program, _link: link })
        };
        let linked = loader.program(Self::PROGRAM.0, Self::PROGRAM.1).and_then(link);
        linked.inspect_err(|error| log::info!("exits of threads may be missed: {error}")).ok()
    }
}

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
        let copies: Vec<OwnedFd> = (0..loader.tracepoint_copies).map(load).collect::<Result<_, _>>()?;
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
        least_skipped(&self.copies)
    }
}

/// The number of skips of the program that was skipped least.
pub(super) fn least_skipped(programs: &[OwnedFd]) -> io::Result<u64> {
    programs.iter().try_fold(u64::MAX, |least, program| Ok(least.min(sys::runs_skipped(program.as_fd())?)))
}
