//! What came of a stop.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How long a process was stopped, and what came of it.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Stopped<T> {
    /// From the first thread that was asked to stop to the last that went on.
    pub time: Duration,
    /// Threads that were stopped.
    pub threads: usize,
    /// What came of it.
    pub outcome: T,
}

/// The file that is mapped somewhere.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) struct FileId {
    pub(crate) device: u64,
    pub(crate) inode: u64,
}

/// What a plan needs is mapped into a process: a memfd, which is closed. Nothing leads to it.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Mapped(pub(crate) FileId);

/// What was met when a plan was carried out.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct Hooked {
    /// Threads that were moved from displaced instructions to their copies.
    pub moved_threads: usize,
    /// Signal handlers that will return to the copies of displaced instructions.
    pub moved_frames: usize,
}

/// A word of a process's memory that is to be changed.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Word {
    /// Its address, a multiple of eight.
    pub address: u64,
    /// What must be there.
    pub before: u64,
    /// What is to be there.
    pub after: u64,
}
