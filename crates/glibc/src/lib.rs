//! glibc's heap as data: its arenas, which of their blocks are in use, and what is free in them. The caller reads the memory.
//!
//! `main_arena` is found in the C library's variables by what it looks like (`arena`), the others are linked to it. The blocks of an
//! arena lie side by side, each with its size in front (`walk`). Blocks in a thread's cache and in fast bins look as if they were in use:
//! the former have a key in their second word (`variables`), the latter are listed (`fast`). Large blocks have mappings of their own
//! (`mapped`). A census (`census`) also counts by type (`types`) and size (`tally`), and what CPython's allocator of small objects has
//! (`pools`).
//!
//! The process runs meanwhile, and its memory is its own: whatever is read may be anything. So each step is checked and counted, a
//! part that makes no sense is read again, and what still makes none is given as so many bytes that were not read.

#![forbid(unsafe_code)]

mod arena;
mod census;
#[cfg(test)]
mod census_tests;
mod fast;
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
mod variables;
mod walk;

// What is shared with the fuzz target names the crate.
#[cfg(test)]
extern crate self as heapbpf_glibc;

use std::ops::{Range, RangeInclusive};

use pages::Pages;
use reading::{ATTEMPTS, How};
use tally::Tally;
use types::Types;
use variables::Variables;
use walk::Sums;

pub use census::{Census, RangeSizes, Row, What, census};
pub use pools::Pools;
pub use types::{Files, Language};

/// Minor versions of glibc 2 whose structures are known: the fields of arenas are those of 2.27, and in 2.42 caches of threads are
/// different.
pub const KNOWN: RangeInclusive<u32> = 27..=41;

/// The first version in which links of lists are mangled, and the first with one key for the caches of all threads.
const MANGLED: u32 = 32;
const KEYED: u32 = 34;
/// Most that one thread's cache holds by default: 7 blocks of each of 64 sizes.
const MOST_CACHED_BYTES: u64 = 7 * (64 * 32 + 16 * 2016);

/// The memory of a process, as the caller reads it.
pub trait Memory {
    /// Size of its pages.
    fn page_bytes(&self) -> u64;
    /// Says of each page from number `first` on (address by size) whether it is in memory.
    fn present(&mut self, first: u64, pages: &mut [bool]);
    /// Fills `buffer` from `address`, where all pages were in memory. Returns `false` if it cannot be read.
    fn read(&mut self, address: u64, buffer: &mut [u8]) -> bool;
    /// Fills `buffer` from the file that is mapped at `address`. Returns `false` if there is none, or if it cannot be read.
    fn read_mapped_file(&mut self, address: u64, buffer: &mut [u8]) -> bool {
        let _ = (address, buffer);
        false
    }
}

/// Where a process has what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// The variables of the C library: the writable mapping of its file, and what follows it without a gap.
    pub data: Vec<Range<u64>>,
    /// The main heap (`[heap]`).
    pub heap: Option<Range<u64>>,
    /// Private anonymous mappings that can be read and written.
    pub anonymous: Vec<Range<u64>>,
    /// Number of threads.
    pub threads: u64,
}

/// What glibc has of memory. A block's size is with its header, and as it was rounded up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Heap {
    /// Number of arenas.
    pub arenas: u64,
    /// Blocks in use.
    pub inuse_blocks: u64,
    /// Their sizes.
    pub inuse_bytes: u64,
    /// Of these, what is not in memory: never written to, or swapped out.
    pub absent_bytes: u64,
    /// What the program may be given again: free blocks, and the rest of each arena.
    pub free_bytes: u64,
    /// Of these, what is in memory.
    pub free_resident_bytes: u64,
    /// Of these, blocks in caches of threads and in fast bins, which are not merged with their neighbours.
    pub cached_bytes: u64,
    /// Whole pages that `malloc_trim(0)` would give back, of those that are in memory.
    pub trimmable_bytes: u64,
    /// Pages of arenas and of blocks with their own mappings that are in memory.
    pub resident_bytes: u64,
    /// At most this much of what is in use may be in a cache.
    pub doubtful_bytes: u64,
    /// What was not read because it is swapped out, or because that would have taken too long.
    pub absent_unread_bytes: u64,
    /// What was not read because its structures contradict each other.
    pub inconsistent_bytes: u64,
    /// Whether it was changing while it was read, so that no list of free blocks could be checked.
    pub is_moving: bool,
    /// Whether it is known that `mapped` are all blocks with mappings of their own.
    pub mapped_is_known: bool,
    /// Blocks with mappings of their own, in order.
    pub mapped: Vec<Range<u64>>,
}

impl Heap {
    /// Whether nothing of it is unknown.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.doubtful_bytes == 0 && self.unread_bytes() == 0 && self.mapped_is_known && !self.is_moving
    }

    /// What was not read of its arenas.
    #[must_use]
    pub fn unread_bytes(&self) -> u64 {
        self.absent_unread_bytes.saturating_add(self.inconsistent_bytes)
    }
}

/// Why a heap is not read at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotRead {
    /// The layout of this version is not known.
    Version,
    /// These variables have no arena: nobody has called glibc's `malloc`.
    NoArena,
    /// The arenas contradict each other.
    Inconsistent,
}

/// Reads the heap of glibc 2.`version`.
///
/// # Errors
/// [`NotRead`].
pub fn read(memory: &mut dyn Memory, space: &Space, version: u32) -> Result<Heap, NotRead> {
    read_by(&mut Pages::new(memory), space, version, &mut None).map(|(heap, ..)| heap)
}

/// Reads the heap, and counts its blocks by type and size if there are `types`. Returns the addresses of its arenas as well.
fn read_by(
    pages: &mut Pages,
    space: &Space,
    version: u32,
    types: &mut Option<Types>,
) -> Result<(Heap, Tally, Vec<u64>), NotRead> {
    if !KNOWN.contains(&version) {
        return Err(NotRead::Version);
    }
    // A list that a block is just put into may look odd once.
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
