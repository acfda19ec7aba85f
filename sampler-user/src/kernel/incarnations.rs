//! The incarnations of processes that live: with an exec a process begins anew, under its old id.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use sampler_ebpf::abi::ProcessKey;
use zerocopy::FromBytes as _;

use super::KernelError;
use super::programs::Programs;
use super::sys;

fn failed(source: std::io::Error) -> KernelError {
    KernelError::Read { what: "the list of processes", source }
}

/// The incarnations that live, of all processes of the host; each as often as it has threads. `iterator`: the link of
/// [`Programs::process_iterator_link`].
///
/// # Errors
/// The read fails.
pub fn living(iterator: BorrowedFd<'_>) -> Result<Vec<ProcessKey>, KernelError> {
    let bytes = sys::read_iterator(iterator).map_err(failed)?;
    Ok(bytes.chunks_exact(size_of::<ProcessKey>()).flat_map(ProcessKey::read_from_bytes).collect())
}

/// Which incarnation of a process lives now. The records of its execs come later.
pub struct Incarnations {
    iterator: OwnedFd,
}

impl Incarnations {
    /// Of all processes of the host.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn open(programs: &Programs) -> Result<Self, KernelError> {
        Ok(Self { iterator: programs.process_iterator_link().try_clone_to_owned().map_err(failed)? })
    }

    /// Whether this one lives. `false` also if that cannot be read.
    pub fn lives(&self, process: ProcessKey) -> bool {
        living(self.iterator.as_fd()).is_ok_and(|living| living.contains(&process))
    }
}
