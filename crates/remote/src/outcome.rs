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

/// A moment at which the caller may do something to the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Everything is mapped and nothing leads to it. One thread is stopped, the others run.
    Mapped,
    /// All threads are stopped, and no jump has been written.
    Stopped,
}

/// Why the caller does not go on at a [`Moment`]. Everything is taken back.
#[derive(Debug)]
pub enum Prevented {
    /// Another attempt may succeed.
    NotNow,
    /// Something failed.
    Failed(std::io::Error),
}
