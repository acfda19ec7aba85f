//! What came of a stop.

use std::time::Duration;

/// How long a process was stopped, and what came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped<T> {
    /// From the first thread that was asked to stop to the last that went on.
    pub time: Duration,
    /// How long one thread was stopped before, while all others ran.
    pub alone: Duration,
    /// Threads that were stopped.
    pub threads: usize,
    /// What came of it.
    pub outcome: T,
}

/// What a plan needs is mapped into a process, and its memfd is open there. Nothing leads to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// Number of the memfd in the process.
    pub(crate) fd: u64,
    /// Its device and inode.
    pub(crate) file: (u64, u64),
}

/// What was met when a plan was carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hooked {
    /// Threads that were moved from displaced instructions to their copies.
    pub moved_threads: usize,
    /// Signal handlers that will return to the copies of displaced instructions.
    pub moved_frames: usize,
}

/// What to do with a blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakeOut {
    /// Put the original pages back: no jump leads to it any more. It stays mapped, and can still be read.
    Jumps,
    /// That, and unmap it, unless a thread may come back to it.
    All,
}

/// A word of a process's memory that is to be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word {
    /// Its address, a multiple of eight.
    pub address: u64,
    /// What must be there.
    pub before: u64,
    /// What is to be there.
    pub after: u64,
}
