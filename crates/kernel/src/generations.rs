//! Lists the live process generations. An exec begins a new generation under the same PID.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use sampler_ebpf::abi::{LivingThread, ProcessKey};
use zerocopy::FromBytes as _;

use super::KernelError;
use super::programs::Programs;
use super::sys;

fn failed(source: std::io::Error) -> KernelError {
    KernelError::Read { what: "the list of processes", source }
}

/// The live generations of all processes on the host, each listed once per thread. `iterator` is the link of
/// [`Programs::process_iterator_link`].
///
/// # Errors
/// The read fails.
pub fn living(iterator: BorrowedFd<'_>) -> Result<Vec<ProcessKey>, KernelError> {
    Ok(threads(iterator)?.into_iter().map(|thread| thread.process).collect())
}

/// All threads of live processes. `iterator` is the same as for [`living`].
///
/// # Errors
/// The read fails.
pub fn threads(iterator: BorrowedFd<'_>) -> Result<Vec<LivingThread>, KernelError> {
    let bytes = sys::read_iterator(iterator).map_err(failed)?;
    Ok(bytes.chunks_exact(size_of::<LivingThread>()).flat_map(LivingThread::read_from_bytes).collect())
}

/// Whether only a process's own threads use its memory.
fn is_alone(threads: &[LivingThread], process: ProcessKey) -> bool {
    let own = || threads.iter().filter(|thread| thread.process == process && thread.memory_users > 0);
    let count = own().count() as u64;
    count > 0 && own().all(|thread| thread.memory_users <= count)
}

/// How often to check, because a process that reads another's memory, as ps(1) does, uses that memory for a moment.
const LOOKS: usize = 3;

/// Checks which generation of a process is live now. The records of its execs arrive later.
pub struct Generations {
    iterator: OwnedFd,
}

impl Generations {
    /// Opens the list of all processes on the host.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn open(programs: &Programs) -> Result<Self, KernelError> {
        Ok(Self { iterator: programs.process_iterator_link().try_clone_to_owned().map_err(failed)? })
    }

    /// Whether this generation is live. `false` also if that cannot be read.
    pub fn lives(&self, process: ProcessKey) -> bool {
        living(self.iterator.as_fd()).is_ok_and(|living| living.contains(&process))
    }

    /// Whether this generation is live and only its own threads use its memory. The latter does not hold for processes
    /// that `vfork` or `clone` with `CLONE_VM` created. `false` also if that cannot be read.
    pub fn lives_alone(&self, process: ProcessKey) -> bool {
        (0..LOOKS).any(|_| threads(self.iterator.as_fd()).is_ok_and(|threads| is_alone(&threads, process)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_shares_memory_is_one_more_than_the_threads() {
        let process = |tgid| ProcessKey { tgid, ..ProcessKey::default() };
        let thread = |tgid, memory_users| LivingThread { process: process(tgid), memory_users, cpu_ns: 0 };
        // The last thread of 2 has left its memory. 3 and 4 share theirs.
        let threads = [thread(1, 2), thread(1, 2), thread(2, 1), thread(2, 0), thread(3, 2), thread(4, 2)];
        assert_eq!([1, 2, 3, 4, 5].map(|tgid| is_alone(&threads, process(tgid))), [true, true, false, false, false]);
    }
}
