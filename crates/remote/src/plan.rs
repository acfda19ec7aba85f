//! What is to be mapped into a process, decided before it is stopped. Pure.
//!
//! ```text
//!  base ┬ text          ┐ the caller's blob: text from the memfd, at offset = address − base,
//!       ├ data …        ┘ and anonymous data
//!       └ per run of replaced pages, a page apart:
//!           spare place ─ where the original pages are kept; the memfd has a copy of them at this offset
//!           copy        ─ that copy, mapped until it is moved to where the original pages were
//! ```
//! The second half of the memfd holds, at the same offsets, the pages with the jumps. Code that removes the jumps can
//! thus distinguish them from what others have written since.
//!
//! One private mapping of the memfd reserves all of it, and the memfd's name says where it begins and how long it is.
//! So `/proc/PID/maps` alone says what was done to a process, and how to undo it.
//!
//! None of this is unmapped once jumps have led to it: code may return there from places that nothing searches, such as
//! a stack that no thread is on. Without the jumps it leads to the original code. [`Plan::again`] uses it again.
//!
//! The copies that replace pages hold the same code at first. So it does not matter if a starved thread makes that
//! system call late, even after the injector died. The injector itself then writes the jumps, while all threads are
//! stopped.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::found::FoundBlob;
use crate::maps::{Mapping, Maps, PAGE_BYTES};
use crate::same_code::{LEA, NOP10};
use crate::wire::base64_bytes;

/// Prefix of all our memfds' names.
pub const NAME_PREFIX: &str = "heapbpf-";
/// Most bytes that are reserved for one blob.
pub const MAX_BYTES: u64 = 1 << 30;
/// Most bytes of pages that one blob replaces: they are read while the process is stopped.
pub const MAX_REPLACED_BYTES: u64 = 16 << 20;
/// Longest name of a blob, bytes.
const MAX_NAME: usize = 64;
/// Private anonymous memory of a blob.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct Data {
    /// Offsets from the base; whole pages.
    pub range: Range<u64>,
    /// Forked children find zeroes there instead of a copy.
    pub is_wiped_on_fork: bool,
    /// Its initial content; zeroes follow.
    #[serde(with = "base64_bytes")]
    pub initial: Vec<u8>,
}

/// Text pages that are to be replaced.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct Pages {
    /// Address of the first.
    pub start: u64,
    /// The file's content there; whole pages.
    #[serde(with = "base64_bytes")]
    pub original: Vec<u8>,
    /// The content to put there.
    #[serde(with = "base64_bytes")]
    pub edited: Vec<u8>,
}

impl Pages {
    /// Their addresses.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.start..self.start.saturating_add(self.original.len() as u64)
    }
}

/// Instructions that are overwritten by a jump.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct Displaced {
    /// Their addresses; the jump is at the beginning.
    pub range: Range<u64>,
    /// The address of each further instruction, and of its copy in the text.
    pub copies: Vec<(u64, u64)>,
}

/// The parts of a plan.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct Draft {
    /// Name of the blob: letters, digits and hyphens, beginning with [`NAME_PREFIX`].
    pub name: String,
    /// Address of the blob, from [`Maps::gap`] for [`reserved_bytes`].
    pub base: u64,
    /// Bytes of the blob, text and data; whole pages.
    pub bytes: u64,
    /// Code, from the base on; whole pages.
    #[serde(with = "base64_bytes")]
    pub text: Vec<u8>,
    /// Memory, ascending.
    pub data: Vec<Data>,
    /// Pages to replace.
    pub pages: Vec<Pages>,
    /// Instructions that the edited pages no longer contain.
    pub displaced: Vec<Displaced>,
}

/// Bytes that a blob needs: its own, plus spare places and copies for `replaced` bytes of pages in `runs` runs.
#[must_use]
pub const fn reserved_bytes(blob: u64, replaced: u64, runs: usize) -> u64 {
    let between = (runs as u64).saturating_mul(2 * PAGE_BYTES);
    blob.saturating_add(replaced.saturating_mul(2)).saturating_add(between)
}

/// Why a draft cannot become a plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Not whole pages, empty, outside of the blob, or overlapping.
    #[error("{0} of the draft does not fit into the blob, in whole pages")]
    Shape(&'static str),
    /// The name does not allow finding the blob again.
    #[error("the name {0:?} is not made of {NAME_PREFIX}, letters, digits and hyphens, or too long")]
    Name(String),
    /// Something is mapped where the blob should go.
    #[error("another mapping lies between {:#x} and {:#x}", .0.start, .0.end)]
    Occupied(Range<u64>),
    /// Replaced pages must belong to a private, executable, not writable mapping of a file.
    #[error("the pages at {0:#x} are not code of a single file")]
    NotText(u64),
    /// Displaced instructions are outside of the replaced pages, or copies outside of the text.
    #[error("the displaced instructions at {0:#x}, or their copies, are not in the replaced pages and in the text")]
    Displaced(u64),
}

/// A step that is carried out on the stopped process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Create the memfd, and fill it.
    Create,
    /// Reserve all addresses by mapping the memfd without any access.
    Reserve,
    /// Map this data, and all data that follows it without a gap.
    MapData(usize),
    /// Have this data wiped in forked children.
    WipeOnFork(usize),
    /// Write the initial content of this data.
    FillData(usize),
    /// Map the copy of these pages.
    MapCopy(usize),
    /// Map the text.
    MapText,
    /// Close the memfd.
    Close,
    /// Empty this data, which an earlier run has used.
    Empty(usize),
    /// Move threads, and interrupted code, from displaced instructions to their copies.
    MoveThreads,
    /// Keep these pages at their spare place. The file's pages stay mapped where they were.
    SetAside(usize),
    /// Move the copy over them. The memfd's pages stay mapped where the copy was.
    Replace(usize),
    /// Write the jumps into the copies.
    Write,
}

/// The part of a plan that is done in one stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Map everything. No code that runs changes.
    Map,
    /// Replace pages and write jumps.
    Replace,
}

/// How a step is undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Undo {
    /// Close the memfd.
    Close,
    /// Unmap everything that was reserved: nothing has led there.
    Unmap,
    /// Move threads back.
    MoveBack,
    /// Write the original code over the jumps.
    Restore,
    /// Move the pages back from the spare place. It stays reserved, so that nothing else is mapped there.
    PutBack(Kept),
}

/// Pages that are kept at a spare place.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) struct Kept {
    pub(crate) start: u64,
    pub(crate) spare: u64,
    pub(crate) bytes: u64,
    /// Offset of the first page in its file.
    pub(crate) offset: u64,
}

impl Kept {
    /// Addresses of the copy.
    pub(crate) fn copy(&self) -> Range<u64> {
        let start = self.spare + self.bytes + PAGE_BYTES;
        start..start + self.bytes
    }
}

/// What is to be mapped into a process, checked.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct Plan {
    draft: Draft,
    /// All reserved bytes.
    reserved: u64,
    /// For each run of replaced pages: the mapping that contains it.
    mappings: Vec<Range<u64>>,
    /// For each run of replaced pages: its offset in the file.
    offsets: Vec<u64>,
    /// Whether an earlier run has mapped it.
    is_mapped: bool,
}

impl Plan {
    /// Checks a draft against the process's mappings.
    ///
    /// # Errors
    /// The draft is inconsistent, or does not fit the mappings.
    pub fn new(draft: Draft, maps: &Maps) -> Result<Self, PlanError> {
        let plan = Self::checked(draft, maps)?;
        let is_free = |mapping: &Mapping| !overlap(&mapping.range, &plan.range());
        if maps.as_slice().iter().all(is_free) { Ok(plan) } else { Err(PlanError::Occupied(plan.range())) }
    }

    /// A plan that uses what an earlier run mapped, if no jump leads to it and it is exactly what this draft needs, at
    /// its base. `read` reads the memfd at an offset. `None` if it is something else.
    #[must_use]
    pub fn again(draft: Draft, maps: &Maps, found: &FoundBlob, read: impl Fn(u64, &mut [u8]) -> bool) -> Option<Self> {
        let plan = Self::checked(draft, maps).ok().filter(|plan| found.is_inert() && found.range == plan.range())?;
        let is_ours = |start: u64| maps.at(start).filter(|mapping| mapping.inode == found.inode && mapping.is_text());
        let is_text = is_ours(plan.draft.base).is_some_and(|text| text.range == plan.text());
        let is_copied = (0..plan.draft.pages.len()).map(|at| plan.kept(at)).all(|kept| {
            let offset = kept.spare - plan.draft.base;
            is_ours(kept.copy().start).is_some_and(|copy| copy.range == kept.copy() && copy.offset == offset)
        });
        let has_data = plan.draft.data.iter().map(|data| plan.draft.base + data.range.start).all(|start| {
            maps.at(start).is_some_and(|mapping| mapping.is_writable && !mapping.is_shared && mapping.is_anonymous())
        });
        let is_same = plan.contents().all(|(offset, bytes)| {
            let mut memfd = vec![0; bytes.len()];
            read(offset, &mut memfd) && memfd == bytes
        });
        let is_it = found.name == plan.draft.name && is_text && is_copied && has_data && is_same;
        is_it.then_some(Self { is_mapped: true, ..plan })
    }

    fn checked(draft: Draft, maps: &Maps) -> Result<Self, PlanError> {
        let is_plain = |name: &str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        if !draft.name.starts_with(NAME_PREFIX) || draft.name.len() > MAX_NAME || !is_plain(&draft.name) {
            return Err(PlanError::Name(draft.name));
        }
        let replaced = draft.pages.iter().map(|pages| pages.original.len() as u64).fold(0, u64::saturating_add);
        if replaced > MAX_REPLACED_BYTES {
            return Err(PlanError::Shape("all that is replaced"));
        }
        let reserved = reserved_bytes(draft.bytes, replaced, draft.pages.len());
        check_blob(&draft, reserved)?;
        let places = draft.pages.iter().map(|pages| check_pages(pages, maps)).collect::<Result<Vec<_>, _>>()?;
        let (mappings, offsets) = places.into_iter().unzip();
        for (at, pages) in draft.pages.iter().enumerate() {
            if draft.pages[..at].iter().any(|before| overlap(&before.range(), &pages.range())) {
                return Err(PlanError::Shape("a replaced page"));
            }
        }
        draft.displaced.iter().try_for_each(|displaced| check_displaced(displaced, &draft))?;
        Ok(Self { draft, reserved, mappings, offsets, is_mapped: false })
    }

    /// The draft that this plan was made of.
    #[must_use]
    pub fn draft(&self) -> &Draft {
        &self.draft
    }

    /// All addresses that the plan takes.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.draft.base..self.draft.base + self.reserved
    }

    /// Addresses of the text.
    #[must_use]
    pub fn text(&self) -> Range<u64> {
        self.draft.base..self.draft.base + self.draft.text.len() as u64
    }

    /// Name of the memfd.
    pub(crate) fn memfd_name(&self) -> String {
        format!("{}-{:x}-{:x}", self.draft.name, self.draft.base, self.reserved)
    }

    /// Mappings that contain the replaced pages.
    pub(crate) fn mappings(&self) -> &[Range<u64>] {
        &self.mappings
    }

    /// The memfd's content: offsets and bytes.
    pub(crate) fn contents(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let pages = self.draft.pages.iter().enumerate().flat_map(|(at, pages)| {
            let offset = self.kept(at).spare - self.draft.base;
            [(offset, pages.original.as_slice()), (self.reserved + offset, pages.edited.as_slice())]
        });
        [(0, self.draft.text.as_slice())].into_iter().chain(pages)
    }

    /// Where the pages of this number are kept.
    pub(crate) fn kept(&self, at: usize) -> Kept {
        let length = |pages: &Pages| pages.original.len() as u64;
        let before: u64 = self.draft.pages[..at].iter().map(|pages| 2 * (length(pages) + PAGE_BYTES)).sum();
        let pages = &self.draft.pages[at];
        let (start, spare) = (pages.start, self.draft.base + self.draft.bytes + before);
        Kept { start, spare, bytes: length(pages), offset: self.offsets[at] }
    }

    /// The steps of a part, in order. Whatever an injector leaves behind if it dies in between is harmless. Once the
    /// text is mapped, so is everything else.
    pub(crate) fn steps(&self, part: Part) -> Vec<Step> {
        let data = self.draft.data.iter().enumerate();
        let fill = |(at, data): (usize, &Data)| (!data.initial.is_empty()).then_some(Step::FillData(at));
        let runs = 0..self.draft.pages.len();
        match part {
            Part::Map if self.is_mapped => {
                let empty = data.clone().filter(|(_, data)| data.is_wiped_on_fork).map(|(at, _)| Step::Empty(at));
                empty.chain(data.filter_map(fill)).collect()
            }
            Part::Map => {
                let data = data.flat_map(|(at, data)| {
                    let wipe = data.is_wiped_on_fork.then_some(Step::WipeOnFork(at));
                    let map = (!self.follows_data(at)).then_some(Step::MapData(at));
                    [map, wipe, fill((at, data))].into_iter().flatten()
                });
                let steps = [Step::Create, Step::Reserve].into_iter().chain(data);
                steps.chain(runs.map(Step::MapCopy)).chain([Step::MapText, Step::Close]).collect()
            }
            Part::Replace => {
                let pages = runs.flat_map(|at| [Step::SetAside(at), Step::Replace(at)]);
                pages.chain([Step::MoveThreads, Step::Write]).collect()
            }
        }
    }

    /// Whether this data begins where other data ends.
    fn follows_data(&self, at: usize) -> bool {
        let data = &self.draft.data;
        at > 0 && data[at - 1].range.end == data[at].range.start
    }

    /// Range of this data and all that follows it without a gap: one system call maps it. On a busy machine, the
    /// process waits for a CPU twice in each call.
    pub(crate) fn adjacent_data(&self, at: usize) -> Range<u64> {
        let data = &self.draft.data;
        let last = (at + 1..data.len()).take_while(|next| self.follows_data(*next)).last().unwrap_or(at);
        data[at].range.start..data[last].range.end
    }

    /// The writes that put the jumps into the copies.
    pub(crate) fn jumps(&self) -> Vec<Write> {
        self.draft.pages.iter().flat_map(|pages| writes(pages.start, &pages.original, &pages.edited)).collect()
    }

    /// How to undo a step, if that needs anything.
    pub(crate) fn undo(&self, step: Step) -> Option<Undo> {
        match step {
            Step::Create => Some(Undo::Close),
            Step::Reserve => Some(Undo::Unmap),
            Step::MoveThreads => Some(Undo::MoveBack),
            Step::Write => Some(Undo::Restore),
            Step::SetAside(at) => Some(Undo::PutBack(self.kept(at))),
            // Putting the pages back covers the edited ones; unmapping the reservation covers the rest.
            Step::Replace(_)
            | Step::MapData(_)
            | Step::WipeOnFork(_)
            | Step::FillData(_)
            | Step::MapCopy(_)
            | Step::MapText
            | Step::Close
            | Step::Empty(_) => None,
        }
    }

    /// Where a thread at `address` must go on; `None` if it can stay. `Err`: it is within displaced instructions but
    /// not at one that has a copy, or it is before the call that a probe has put into a no-op.
    pub(crate) fn moved(&self, address: u64) -> Result<Option<u64>, u64> {
        let is_in_no_op = |pages: &Pages| {
            let at = address.checked_sub(pages.start + LEA.len() as u64).and_then(|at| usize::try_from(at).ok());
            at.and_then(|at| pages.original.get(at..)).is_some_and(|code| code.starts_with(&NOP10))
        };
        if self.draft.pages.iter().any(is_in_no_op) {
            return Err(address);
        }
        let inside = |displaced: &&Displaced| displaced.range.contains(&address) && displaced.range.start != address;
        let Some(displaced) = self.draft.displaced.iter().find(inside) else { return Ok(None) };
        displaced.copies.iter().find(|(from, _)| *from == address).map(|(_, to)| Some(*to)).ok_or(address)
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

fn is_whole(number: u64) -> bool {
    number.is_multiple_of(PAGE_BYTES)
}

fn check_blob(draft: &Draft, reserved: u64) -> Result<(), PlanError> {
    let text = draft.text.len() as u64;
    if !is_whole(draft.base) || draft.base == 0 || draft.base.checked_add(MAX_BYTES).is_none() {
        return Err(PlanError::Shape("the base"));
    }
    if !is_whole(draft.bytes) || reserved > MAX_BYTES {
        return Err(PlanError::Shape("the length"));
    }
    if text == 0 || !is_whole(text) || text > draft.bytes {
        return Err(PlanError::Shape("the text"));
    }
    let mut end = text;
    for data in &draft.data {
        let Range { start, end: stop } = data.range;
        let fits = start >= end && stop > start && stop <= draft.bytes && data.initial.len() as u64 <= stop - start;
        if !fits || !is_whole(start) || !is_whole(stop) {
            return Err(PlanError::Shape("data"));
        }
        end = stop;
    }
    Ok(())
}

/// The mapping that contains the pages, and their offset in its file.
fn check_pages(pages: &Pages, maps: &Maps) -> Result<(Range<u64>, u64), PlanError> {
    let bytes = pages.original.len();
    if bytes == 0 || bytes != pages.edited.len() || !is_whole(bytes as u64) || !is_whole(pages.start) {
        return Err(PlanError::Shape("a replaced page"));
    }
    let is_text = |mapping: &&Mapping| mapping.is_text() && mapping.is_readable && mapping.covers(&pages.range());
    let mapping = maps.at(pages.start).filter(is_text).ok_or(PlanError::NotText(pages.start))?;
    Ok((mapping.range.clone(), mapping.offset.saturating_add(pages.start - mapping.range.start)))
}

fn check_displaced(displaced: &Displaced, draft: &Draft) -> Result<(), PlanError> {
    let range = &displaced.range;
    let text = draft.base..draft.base + draft.text.len() as u64;
    let is_replaced =
        draft.pages.iter().map(Pages::range).any(|pages| pages.start <= range.start && range.end <= pages.end);
    let fits = |(from, to): &(u64, u64)| range.contains(from) && text.contains(to);
    if range.is_empty() || !is_replaced || !displaced.copies.iter().all(fits) {
        return Err(PlanError::Displaced(range.start));
    }
    Ok(())
}

/// Eight bytes, and their address.
pub(crate) type Write = (u64, [u8; 8]);

/// The writes that turn memory at `start` from `before` into `after`, which is as long.
pub(crate) fn writes(start: u64, before: &[u8], after: &[u8]) -> Vec<Write> {
    let mut writes = Vec::new();
    let mut at = 0;
    while let Some(further) = before[at..].iter().zip(&after[at..]).position(|(before, after)| before != after) {
        // A jump is written in one piece, wherever it begins.
        at = (at + further).min(after.len() - 8);
        let bytes = std::array::from_fn(|offset| after[at + offset]);
        writes.push((start + at as u64, bytes));
        at += 8;
    }
    writes
}

#[cfg(test)]
use crate::same_code::{is_same_code, other_code};
#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
