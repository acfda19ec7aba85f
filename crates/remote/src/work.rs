//! A stop as data: the work to do on a process while it is stopped, requests to the helper process that does it, and
//! results. Pure.

use std::ops::Range;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::found::FoundBlob;
use crate::plan::{Kept, Pages, Plan};

/// The work to do on a process while it is stopped.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) enum Work {
    /// Map what a plan needs.
    Map(Planned),
    /// Replace the plan's pages of text, if the caller agrees; it is only asked if `is_asked`.
    Replace { planned: Planned, mapped: Mapped, is_asked: bool },
    /// Remove the jumps to what was found, and free its memory in `emptied`, as offsets from its beginning.
    TakeOut { found: FoundBlob, emptied: Range<u64> },
    /// Write words of its memory.
    Write(Vec<Word>),
}

/// A plan, with data that is looked up before the stop.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Planned {
    pub(crate) plan: Plan,
    /// The file of each run of replaced pages.
    pub(crate) files: Vec<FileId>,
    pub(crate) memfd_flags: u32,
}

/// The result of a piece of work. Fields that do not belong to the work have their default values.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Outcome {
    pub(crate) mapped: Option<Mapped>,
    pub(crate) hooked: Hooked,
    pub(crate) has_written: bool,
}

impl Work {
    /// Memory of the process that the work reads; it is faulted in before the stop.
    pub(crate) fn pages(&self) -> Vec<Range<u64>> {
        let both = |kept: &Kept| [kept.start, kept.spare].map(|start| start..start + kept.bytes);
        match self {
            Self::Map(planned) | Self::Replace { planned, .. } => {
                planned.plan.draft().pages.iter().map(Pages::range).collect()
            }
            Self::TakeOut { found, .. } => found.pages.iter().chain(&found.put_back).flat_map(both).collect(),
            Self::Write(words) => words.iter().map(|word| word.address..word.address + 8).collect(),
        }
    }
}

/// A request, with the work to do. Descriptors of the process and of its memory come with it.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Request<W> {
    pub(crate) pid: i32,
    /// Start time of the process, as in `/proc/PID/stat`.
    pub(crate) start: u64,
    /// Addresses of code that makes a system call, and of code that leaves a signal handler.
    pub(crate) system_call: u64,
    pub(crate) restorer: u64,
    pub(crate) restorer_code: Vec<u8>,
    /// Its threads, and whether each has a seccomp filter.
    pub(crate) filtered: Vec<(i32, bool)>,
    /// Whether the process is left alone while a thread is in a call that would return a part of its work.
    pub(crate) spares_calls: bool,
    pub(crate) limit: Duration,
    pub(crate) work: W,
}

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
