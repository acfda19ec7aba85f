//! Reads glibc's heap: its arenas, which of their blocks are in use, and how much of them is free. The caller supplies
//! access to the memory.
//!
//! `main_arena` is recognised among the C library's variables by its contents (`arena`), and the other arenas are
//! linked to it. The blocks of an arena are adjacent, each with its size in front (`walk`). Blocks in thread caches and
//! in fast bins look as if they were in use: the former have a key in their second word (`arena`), the latter are
//! in lists (`reading`). Large blocks have mappings of their own (`mapped`). A census (`census`) also counts blocks by
//! type (`types`) and size (`tally`), and the blocks of CPython's small-object allocator (`pools`).
//!
//! The process keeps running and controls its memory, so anything may be read there. Each step is therefore checked and
//! bounded. A part that makes no sense is read again. If it still makes none, its size is reported as bytes that were
//! not read.

#![forbid(unsafe_code)]

mod arena;
mod census;
#[cfg(test)]
mod census_tests;
#[cfg(test)]
mod fuzzed;
mod mapped;
mod pages;
mod pools;
mod reading;
mod tally;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod types;
mod walk;

// Code shared with the fuzz target refers to the crate by name.
#[cfg(test)]
extern crate self as heapbpf_glibc;

use std::ops::{Range, RangeInclusive};

use arena::Variables;
use pages::Pages;
use reading::{ATTEMPTS, How};
use tally::Tally;
use types::Types;
use walk::Sums;

pub use census::{Census, RangeSizes, Row, What, census};
pub use pools::{Pools, PythonArenas};
pub use types::{Files, Language};

/// Minor versions of glibc 2 with known structures: arenas have the fields of 2.27, and 2.42 has different thread
/// caches.
pub const KNOWN: RangeInclusive<u32> = 27..=41;

/// The first version in which list links are mangled, and the first with one key for all thread caches.
const MANGLED: u32 = 32;
const KEYED: u32 = 34;
/// Maximum size of one thread's cache by default, bytes: 7 blocks of each of 64 sizes.
const MOST_CACHED_BYTES: u64 = 7 * (64 * 32 + 16 * 2016);

/// The memory of a process, as the caller provides it.
pub trait Memory {
    /// Page size, bytes.
    fn page_bytes(&self) -> u64;
    /// Sets for each page whether it is in memory. `first` is the number of the first one (address divided by page
    /// size).
    fn present(&mut self, first: u64, pages: &mut [bool]);
    /// Fills `buffer` from `address`, where all pages were in memory. Returns `false` if that fails.
    fn read(&mut self, address: u64, buffer: &mut [u8]) -> bool;
    /// Fills `buffer` from the file that is mapped at `address`. Returns `false` if there is none, or if it cannot be
    /// read.
    fn read_mapped_file(&mut self, address: u64, buffer: &mut [u8]) -> bool {
        let _ = (address, buffer);
        false
    }
}

/// The parts of an address space that matter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// The variables of the C library: the writable mapping of its file, and the mappings that directly follow it.
    pub data: Vec<Range<u64>>,
    /// The main heap (`[heap]`).
    pub heap: Option<Range<u64>>,
    /// Private anonymous mappings that can be read and written.
    pub anonymous: Vec<Range<u64>>,
    /// Number of threads.
    pub threads: u64,
    /// Whether Python's arenas are to be found, too.
    pub has_python: bool,
}

/// glibc's memory. The size of a block includes its header and rounding.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Heap {
    /// Number of arenas.
    pub arenas: u64,
    /// Number of blocks in use.
    pub inuse_blocks: u64,
    /// Sum of their sizes.
    pub inuse_bytes: u64,
    /// The part of these bytes that is not in memory: never written to, or swapped out.
    pub absent_bytes: u64,
    /// Bytes that can be handed out again: free blocks, and each arena's top block.
    pub free_bytes: u64,
    /// The part of these bytes that is in memory.
    pub free_resident_bytes: u64,
    /// The part of these bytes in thread caches and fast bins, whose blocks are not merged with their neighbours.
    pub cached_bytes: u64,
    /// Whole pages in memory that `malloc_trim(0)` would return to the system, bytes.
    pub trimmable_bytes: u64,
    /// Pages in memory of arenas and of blocks with their own mappings, bytes.
    pub resident_bytes: u64,
    /// Maximum part of the bytes in use that may actually be in caches.
    pub doubtful_bytes: u64,
    /// Bytes that were not read because they are swapped out, or because reading them would take too long.
    pub absent_unread_bytes: u64,
    /// Bytes that were not read because their structures are inconsistent.
    pub inconsistent_bytes: u64,
    /// Whether the heap was changing while it was read, so that no list of free blocks could be checked.
    pub is_moving: bool,
    /// Whether `mapped` is known to have all blocks with mappings of their own.
    pub mapped_is_known: bool,
    /// Blocks with mappings of their own, in order.
    pub mapped: Vec<Range<u64>>,
    /// Python's arenas, which are not in the figures above; `None` if they were not looked for, or not everywhere.
    pub python: Option<PythonArenas>,
}

impl Heap {
    /// Whether everything about the heap is known exactly.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.doubtful_bytes == 0 && self.unread_bytes() == 0 && self.mapped_is_known && !self.is_moving
    }

    /// Bytes of its arenas that were not read.
    #[must_use]
    pub fn unread_bytes(&self) -> u64 {
        self.absent_unread_bytes.saturating_add(self.inconsistent_bytes)
    }

    /// Where its large blocks and Python's arenas are: in order, and not overlapping.
    #[must_use]
    pub fn ranges(&self) -> Vec<Range<u64>> {
        let python = self.python.iter().flat_map(|python| &python.ranges);
        let mut ranges: Vec<Range<u64>> = self.mapped.iter().chain(python).cloned().collect();
        ranges.sort_unstable_by_key(|range| range.start);
        ranges.dedup_by(|next, before| {
            let is_apart = next.start > before.end;
            before.end = if is_apart { before.end } else { before.end.max(next.end) };
            !is_apart
        });
        ranges
    }
}

/// Why a heap could not be read at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotRead {
    /// The layout of this version is not known.
    Version,
    /// There is no arena in these variables: glibc's `malloc` has not been called.
    NoArena,
    /// The arenas are inconsistent.
    Inconsistent,
}

/// Reads the heap of glibc 2.`version`.
///
/// # Errors
/// [`NotRead`].
pub fn read(memory: &mut dyn Memory, space: &Space, version: u32) -> Result<Heap, NotRead> {
    let mut pages = Pages::new(memory);
    let (mut heap, _, arenas) = read_by(&mut pages, space, version, &mut None)?;
    if space.has_python {
        heap.python = pools::arenas(&mut pages, space, &arenas, &heap.mapped);
    }
    Ok(heap)
}

/// Reads the heap, and counts its blocks by type and size if `types` is given. Also returns the addresses of its
/// arenas.
fn read_by(
    pages: &mut Pages,
    space: &Space,
    version: u32,
    types: &mut Option<Types>,
) -> Result<(Heap, Tally, Vec<u64>), NotRead> {
    if !KNOWN.contains(&version) {
        return Err(NotRead::Version);
    }
    // A list may look inconsistent for a moment while a block is added to it.
    let variables = (0..ATTEMPTS).find_map(|_| Variables::read(pages, space, version)).ok_or(NotRead::NoArena)?;
    let keys = if version >= KEYED { variables.keys.as_slice() } else { &[] };
    let arenas = (0..ATTEMPTS).find_map(|_| arena::all(pages, variables.main)).ok_or(NotRead::Inconsistent)?;
    let mut heap = Heap { arenas: arenas.len() as u64, ..Heap::default() };
    let (mut all, how) = (Sums::default(), How { space, keys, is_mangled: version >= MANGLED });
    for base in &arenas {
        let is_main = *base == variables.main;
        reading::arena(pages, *base, is_main.then_some(&variables), &how, (&mut heap, &mut all), types);
    }
    let (key, cached) = if version >= KEYED { all.cached() } else { (0, walk::Blocks::default()) };
    all.tally.without_key(key);
    if version < KEYED {
        let most = MOST_CACHED_BYTES.saturating_mul(space.threads.max(1));
        heap.doubtful_bytes = heap.doubtful_bytes.saturating_add(all.small_bytes.min(most));
    }
    let used = all.used.without(cached);
    heap.cached_bytes = heap.cached_bytes.saturating_add(cached.bytes);
    (heap.inuse_blocks, heap.inuse_bytes) = (used.count, used.bytes);
    heap.absent_bytes = all.used_absent_bytes;
    heap.free_bytes = all.free_bytes.saturating_add(heap.cached_bytes);
    heap.free_resident_bytes = all.free_resident_bytes.saturating_add(heap.cached_bytes);
    heap.trimmable_bytes = all.trimmable_bytes;
    mapped::add(pages, space, &arenas, variables.mapped, &mut heap);
    heap.doubtful_bytes = heap.doubtful_bytes.min(heap.inuse_bytes);
    let mut tally = all.tally;
    if let Some(types) = types {
        mapped::note(pages, &heap, types, &mut tally);
    }
    Ok((heap, tally, arenas))
}
