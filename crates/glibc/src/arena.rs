//! Arenas (`struct malloc_state`) and the memory regions that they own.

use std::collections::HashSet;
use std::ops::Range;

use crate::pages::{Pages, word};
use crate::walk::{BITS, HEADER};

/// Size of an arena's structure, and offsets of its fields: fast bins, top block, bins, bin map, next arena, and bytes
/// from the system (malloc/malloc.c).
pub(crate) const SIZE: u64 = 2200;
const FAST: usize = 16;
pub(crate) const TOP: usize = 96;
pub(crate) const BINS: usize = 112;
pub(crate) const BIN_MAP: usize = 2144;
pub(crate) const NEXT: usize = 2160;
pub(crate) const SYSTEM: usize = 2184;
/// Number of fast bins (lists of small free blocks).
pub(crate) const FAST_BINS: usize = 10;

/// Size and alignment of the heaps of non-main arenas, and the sizes of their headers (malloc/arena.c).
pub(crate) const HEAP: u64 = 64 << 20;
const HEAP_HEADERS: [u64; 2] = [0x20, 0x30];
/// Maximum growth of the main heap while it is read, bytes.
const MOST_GROWN: u64 = 64 << 20;
/// Maximum number of arenas, and of heaps per arena.
const MOST_ARENAS: usize = 1 << 14;
const MOST_HEAPS: usize = 1 << 14;

/// Why something was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// It is not in memory, or reading it would take too long.
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
    /// First block of each fast bin.
    pub(crate) fast: [u64; FAST_BINS],
    pub(crate) top: u64,
    next: u64,
    /// Bytes obtained from the system.
    pub(crate) system_bytes: u64,
}

/// A range of adjacent blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    /// Address of the first block.
    pub(crate) start: u64,
    /// End of the last block.
    pub(crate) end: u64,
    pub(crate) is_main: bool,
    /// Whether the region ends with two empty blocks instead of the arena's top block.
    pub(crate) ends_with_fence: bool,
    /// The whole memory that the region is part of, including what precedes its blocks.
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
        // No address space has more than this.
        let system_bytes = system_bytes.min(1 << 47);
        Some(Self { base, fast, top: word(&bytes, TOP), next: word(&bytes, NEXT), system_bytes })
    }

    /// Returns the end of the top block.
    fn end(&self, pages: &mut Pages) -> Result<u64, Why> {
        let [_, head] = pages.words::<2>(self.top).ok_or(Why::Absent)?;
        self.top.checked_add(head & !BITS).ok_or(Why::Inconsistent)
    }

    /// Returns the blocks of the main arena, which lie in the main heap from `sbrk_base` on.
    pub(crate) fn main_heap(
        &self,
        pages: &mut Pages,
        sbrk_base: Option<u64>,
        heap: Option<&Range<u64>>,
    ) -> Result<Vec<Region>, Why> {
        // The arena has no memory yet: its top block is a field of the arena itself.
        if self.top == self.base + TOP as u64 {
            return Ok(Vec::new());
        }
        // The heap may have grown since its range was read.
        let heap = heap.map(|heap| heap.start..heap.end.saturating_add(MOST_GROWN));
        let heap = heap.filter(|heap| heap.contains(&self.top)).ok_or(Why::Inconsistent)?;
        // Memory that a static program got from the system earlier, such as the main thread's variables, lies below it.
        let base = sbrk_base.unwrap_or(heap.start);
        let (start, end) = (base.checked_next_multiple_of(HEADER).unwrap_or(base), self.end(pages)?);
        if end > heap.end || start >= end {
            return Err(Why::Inconsistent);
        }
        Ok(vec![Region { start, end, is_main: true, ends_with_fence: false, whole: base..end, arena: start..end }])
    }

    /// Returns the blocks of a non-main arena: those of each of its heaps, from the newest to the one that contains the
    /// arena itself.
    pub(crate) fn heaps(&self, pages: &mut Pages) -> Result<Vec<Region>, Why> {
        let own = self.base & !(HEAP - 1);
        let mut at = self.top & !(HEAP - 1);
        let (mut regions, mut seen) = (Vec::new(), HashSet::new());
        loop {
            let [arena, previous, size, _, _, sixth] = pages.words::<6>(at).ok_or(Why::Absent)?;
            let is_one = arena == self.base && size <= HEAP && size.is_multiple_of(pages.page_bytes);
            let start = match at == own {
                true => (self.base + SIZE).next_multiple_of(HEADER),
                // In older versions this is a block's size, in newer ones it is unused.
                false => at + HEAP_HEADERS[usize::from(sixth == 0)],
            };
            let is_newest = regions.is_empty();
            // The newest heap may be growing or shrinking, so its size may not match its last block yet.
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

/// Returns the addresses of all arenas, the main one first. Each arena links to the next one, and the last one to the
/// main one.
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
