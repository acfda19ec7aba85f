//! Results of a stop.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How long a process was stopped, and the result.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Stopped<T> {
    /// From when the first thread was asked to stop until the last went on.
    pub time: Duration,
    /// Threads that were stopped.
    pub threads: usize,
    /// The result.
    pub outcome: T,
}

/// Identifies the file of a mapping.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) struct FileId {
    pub(crate) device: u64,
    pub(crate) inode: u64,
}

/// A plan's code and data, mapped into a process from a memfd that is closed again. Nothing leads to them yet.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Mapped(pub(crate) FileId);

/// What had to be moved when a plan was carried out.
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
    /// The value that must be there.
    pub before: u64,
    /// The value to write.
    pub after: u64,
}
