//! The work to do on a process while it is stopped, as data.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::found::FoundBlob;
use crate::outcome::{FileId, Hooked, Mapped, Word};
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
