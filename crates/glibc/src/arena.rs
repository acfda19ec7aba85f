//! Arenas (`struct malloc_state`) and the parts of memory that they have.

use std::collections::HashSet;
use std::ops::Range;

use crate::pages::{Pages, word};
use crate::walk::{BITS, HEADER};

/// Size of an arena's structure, and where it has what: lists of small free blocks, the block at its end, lists of free blocks, the next
/// arena, and how much memory it has (malloc/malloc.c).
pub(crate) const SIZE: u64 = 2200;
const FAST: usize = 16;
pub(crate) const TOP: usize = 96;
pub(crate) const BINS: usize = 112;
pub(crate) const BIN_MAP: usize = 2144;
pub(crate) const NEXT: usize = 2160;
pub(crate) const SYSTEM: usize = 2184;
/// Number of lists of small free blocks.
pub(crate) const FAST_BINS: usize = 10;

/// Size and alignment of the heaps of other arenas, and of their headers (malloc/arena.c).
pub(crate) const HEAP: u64 = 64 << 20;
const HEAP_HEADERS: [u64; 2] = [0x20, 0x30];
/// Most that the main heap grows while it is read.
const MOST_GROWN: u64 = 64 << 20;
/// Most arenas, and most heaps of one.
const MOST_ARENAS: usize = 1 << 14;
const MOST_HEAPS: usize = 1 << 14;

/// Why something was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// It is not in memory, or there was no time.
    Absent,
    /// It makes no sense.
    Inconsistent,
}

impl Why {
    pub(crate) fn worst(self, other: Self) -> Self {
        if self == other { self } else { Self::Inconsistent }
    }
}

/// An arena.
#[derive(Clone, Debug)]
pub(crate) struct Arena {
    base: u64,
    /// First blocks of the lists of small free blocks.
    pub(crate) fast: [u64; FAST_BINS],
    pub(crate) top: u64,
    next: u64,
    /// What it has got from the system.
    pub(crate) system_bytes: u64,
}

/// Blocks side by side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    /// The first block.
    pub(crate) start: u64,
    /// The end of the last one.
    pub(crate) end: u64,
    pub(crate) is_main: bool,
    /// Whether two empty blocks are at the end, in place of the arena's free rest.
    pub(crate) ends_with_fence: bool,
    /// All of the memory that it is part of, with what is in front of its blocks.
    pub(crate) whole: Range<u64>,
    /// From the lowest to the highest address of its arena.
    pub(crate) arena: Range<u64>,
}

impl Arena {
    pub(crate) fn read(pages: &mut Pages, base: u64) -> Option<Self> {
        let mut bytes = [0; SIZE as usize];
        base.checked_add(SIZE)?;
        if !pages.read(base, &mut bytes) {
            return None;
        }
        let system_bytes = word(&bytes, SYSTEM);
        let fast = std::array::from_fn(|bin| word(&bytes, FAST + 8 * bin));
        // More than any address space has is a lie.
        let system_bytes = system_bytes.min(1 << 47);
        Some(Self { base, fast, top: word(&bytes, TOP), next: word(&bytes, NEXT), system_bytes })
    }

    /// The end of the block at the end.
    fn end(&self, pages: &mut Pages) -> Result<u64, Why> {
        let [_, head] = pages.words::<2>(self.top).ok_or(Why::Absent)?;
        self.top.checked_add(head & !BITS).ok_or(Why::Inconsistent)
    }

    /// Blocks of the main arena, which lie in the main heap from `sbrk_base` on.
    pub(crate) fn main_heap(
        &self,
        pages: &mut Pages,
        sbrk_base: Option<u64>,
        heap: Option<&Range<u64>>,
    ) -> Result<Vec<Region>, Why> {
        // It has no memory yet: its end is in itself.
        if self.top == self.base + TOP as u64 {
            return Ok(Vec::new());
        }
        // It may have grown since its range was read.
        let heap = heap.map(|heap| heap.start..heap.end.saturating_add(MOST_GROWN));
        let heap = heap.filter(|heap| heap.contains(&self.top)).ok_or(Why::Inconsistent)?;
        // What a static program had from the system before, such as the main thread's variables, is below it.
        let base = sbrk_base.unwrap_or(heap.start);
        let (start, end) = (base.checked_next_multiple_of(HEADER).unwrap_or(base), self.end(pages)?);
        if end > heap.end || start >= end {
            return Err(Why::Inconsistent);
        }
        Ok(vec![Region { start, end, is_main: true, ends_with_fence: false, whole: base..end, arena: start..end }])
    }

    /// Blocks of another arena: those of each of its heaps, from the newest to that which it lies in itself.
    pub(crate) fn heaps(&self, pages: &mut Pages) -> Result<Vec<Region>, Why> {
        let own = self.base & !(HEAP - 1);
        let mut at = self.top & !(HEAP - 1);
        let (mut regions, mut seen) = (Vec::new(), HashSet::new());
        loop {
            let [arena, previous, size, _, _, sixth] = pages.words::<6>(at).ok_or(Why::Absent)?;
            let is_one = arena == self.base && size <= HEAP && size.is_multiple_of(pages.page_bytes);
            let start = match at == own {
                true => (self.base + SIZE).next_multiple_of(HEADER),
                // Older versions have a block's size there, newer ones have nothing.
                false => at + HEAP_HEADERS[usize::from(sixth == 0)],
            };
            let is_newest = regions.is_empty();
            // The newest one may just grow or shrink, so that its size does not fit its last block yet.
            let end = if is_newest { self.end(pages)? } else { at.saturating_add(size) };
            let is_one = is_one && (start + 1..=at.saturating_add(HEAP)).contains(&end);
            if !is_one || !seen.insert(at) || regions.len() >= MOST_HEAPS {
                return Err(Why::Inconsistent);
            }
            regions.push(Region {
                start,
                end,
                is_main: false,
                ends_with_fence: !is_newest,
                whole: at..end,
                arena: at..end,
            });
            match (at == own, previous == 0) {
                (true, true) => break,
                (false, false) => at = previous,
                _ => return Err(Why::Inconsistent),
            }
        }
        let start = regions.iter().map(|region| region.whole.start).min().unwrap_or(0);
        let end = regions.iter().map(|region| region.whole.end).max().unwrap_or(0);
        regions.iter_mut().for_each(|region| region.arena = start..end);
        Ok(regions)
    }
}

/// The addresses of all arenas, the main one first: each has the next one's, and the last one has the main one's.
pub(crate) fn all(pages: &mut Pages, main: u64) -> Option<Vec<u64>> {
    let (mut found, mut seen) = (vec![main], HashSet::from([main]));
    let mut at = Arena::read(pages, main)?.next;
    while at != main {
        let is_one = HEAP_HEADERS.contains(&(at & (HEAP - 1)));
        if !is_one || found.len() >= MOST_ARENAS || !seen.insert(at) {
            return None;
        }
        found.push(at);
        at = Arena::read(pages, at)?.next;
    }
    Some(found)
}
