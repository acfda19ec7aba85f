//! Lists the live process generations. An exec begins a new generation under the same PID.

use std::collections::HashMap;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use sampler_ebpf::abi::{LivingThread, ProcessKey, syscall_work};
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

/// Time after which a traced process is looked at again: longer than another heapbpf, which traces a process while it
/// stops it, stops one.
const TRACED_PAUSE: Duration = Duration::from_millis(10);

/// Who deals with the system calls of each process that `is_asked` selects: the bits of [`syscall_work`] of all its
/// threads, by process ID. `iterator` is the same as for [`living`].
///
/// # Errors
/// The read fails.
pub fn work_at_calls(
    iterator: BorrowedFd<'_>,
    is_asked: impl Fn(u32) -> bool,
) -> Result<HashMap<u32, u64>, KernelError> {
    let mut work = work_of(&threads(iterator)?, &is_asked);
    if work.values().any(|bits| bits & syscall_work::TRACED != 0) {
        std::thread::sleep(TRACED_PAUSE);
        let later = work_of(&threads(iterator)?, &is_asked);
        work.iter_mut().for_each(|(pid, bits)| *bits &= later.get(pid).copied().unwrap_or(0));
    }
    Ok(work)
}

fn work_of(threads: &[LivingThread], is_asked: impl Fn(u32) -> bool) -> HashMap<u32, u64> {
    let mut work: HashMap<u32, u64> = HashMap::new();
    for thread in threads.iter().filter(|thread| is_asked(thread.process.tgid)) {
        *work.entry(thread.process.tgid).or_default() |= thread.syscall_work;
    }
    work
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
        let thread =
            |tgid, memory_users| LivingThread { process: process(tgid), memory_users, ..LivingThread::default() };
        // The last thread of 2 has left its memory. 3 and 4 share theirs.
        let threads = [thread(1, 2), thread(1, 2), thread(2, 1), thread(2, 0), thread(3, 2), thread(4, 2)];
        assert_eq!([1, 2, 3, 4, 5].map(|tgid| is_alone(&threads, process(tgid))), [true, true, false, false, false]);
    }

    #[test]
    fn one_thread_whose_calls_are_seen_is_enough() {
        let thread = |tgid, syscall_work| {
            let process = ProcessKey { tgid, ..ProcessKey::default() };
            LivingThread { process, syscall_work, ..LivingThread::default() }
        };
        let threads = [thread(1, 0), thread(2, syscall_work::USER_DISPATCH), thread(1, 4), thread(2, 0), thread(3, 0)];
        let expected = HashMap::from([(1, 4), (2, syscall_work::USER_DISPATCH), (3, 0)]);
        assert_eq!(work_of(&threads, |_| true), expected);
        assert_eq!(work_of(&threads, |pid| pid == 1), HashMap::from([(1, 4)]));
    }
}
