//! Arenas (`struct malloc_state`) and the memory regions that they own; the C library's variables, where the main arena
//! is recognised.

use std::collections::HashSet;
use std::ops::Range;

use crate::Space;
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

/// Maximum size of the variables that are read, bytes. A static program has all of its own variables there.
const MOST_BYTES: u64 = 4 << 20;
/// Maximum number of words that may be the key.
const MOST_KEYS: usize = 4096;
/// Number of lists of free blocks.
const LISTS: usize = 127;
/// Maximum number of lists that may look wrong: the program changes them while they are read, or has been interrupted
/// while it links a block, for as long as it gets no processor.
const MOST_MOVING: usize = 8;

/// What the C library's variables show.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Variables {
    /// Address of the main arena.
    pub(crate) main: u64,
    /// Words that may be the key of cached blocks, in order. The key is random, so it does not look like an address.
    pub(crate) keys: Vec<u64>,
    /// Where the main heap begins; `None` if the parameters were not found.
    pub(crate) sbrk_base: Option<u64>,
    /// Number and bytes of blocks with mappings of their own, according to the parameters.
    pub(crate) mapped: Option<(u64, u64)>,
}

impl Variables {
    /// Reads the variables; `None` if there is no main arena that has been used.
    pub(crate) fn read(pages: &mut Pages, space: &Space, version: u32) -> Option<Self> {
        let (mut found, mut keys, mut left) = (None, Vec::new(), MOST_BYTES);
        for range in &space.data {
            let bytes = bytes(pages, range, &mut left);
            if found.is_none()
                && let Some(at) = main_arena(&bytes, range.start)
            {
                let (sbrk_base, mapped) = parameters(&bytes, space.heap.as_ref(), pages.page_bytes, version).unzip();
                found = Some(Self { main: range.start + at as u64, sbrk_base, mapped, keys: Vec::new() });
            }
            let words = bytes.chunks_exact(8).map(|bytes| word(bytes, 0));
            keys.extend(words.filter(|word| !matches!(word >> 48, 0 | 0xffff)).take(MOST_KEYS));
        }
        keys.truncate(MOST_KEYS);
        keys.sort_unstable();
        keys.dedup();
        Some(Self { keys, ..found? })
    }
}

/// Reads the variables in a range. What is absent reads as 0: it was never written to.
fn bytes(pages: &mut Pages, range: &Range<u64>, left: &mut u64) -> Vec<u8> {
    let length = range.end.saturating_sub(range.start).min(*left);
    *left -= length;
    let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
    let page = usize::try_from(pages.page_bytes).unwrap_or(usize::MAX);
    for (part, at) in bytes.chunks_mut(page).zip((range.start..).step_by(page)) {
        if !pages.read(at, part) {
            part.fill(0);
        }
    }
    bytes
}

/// Returns the offset of the main arena in `bytes`, which lie at `address`. Its empty lists point to themselves. They do
/// so too for a place a few lists before or after it, where more of them look wrong.
fn main_arena(bytes: &[u8], address: u64) -> Option<usize> {
    let last = bytes.len().checked_sub(SIZE as usize)?;
    let found = |at: usize| Some((moving_lists(&bytes[at..], address + at as u64)?, at));
    (0..=last).step_by(8).filter_map(found).min().map(|(_, at)| at)
}

/// Returns how many lists of an arena look wrong; `None` if there is no arena at `base`.
fn moving_lists(bytes: &[u8], base: u64) -> Option<usize> {
    let (next, top, system) = (word(bytes, NEXT), word(bytes, TOP), word(bytes, SYSTEM));
    let is_address = |word: u64| word >= 4096 && word >> 47 == 0 && word.is_multiple_of(8);
    if !is_address(next) || !is_address(top) || !system.is_multiple_of(8) || word(bytes, SYSTEM + 8) < system {
        return None;
    }
    let (mut empty, mut moving) = (0, 0);
    for list in 0..LISTS {
        let at = BINS + 16 * list;
        // A list is linked as if it were the third and fourth word of a block, so it points 16 bytes before itself.
        let itself = base + at as u64 - 16;
        let links = [word(bytes, at), word(bytes, at + 8)];
        // The first lists are numbered from 1. The bit of a list with blocks is set, except that of list 1.
        let bit = list + 1;
        let has_bit = || list == 0 || word(bytes, BIN_MAP + bit / 64 * 8) >> (bit % 64) & 1 == 1;
        if links == [itself; 2] {
            empty += 1;
        } else if links.contains(&itself) || !links.iter().all(|link| is_address(*link)) || !has_bit() {
            moving += 1;
            if moving > MOST_MOVING {
                return None;
            }
        }
    }
    (empty > moving).then_some(moving)
}

/// Offsets of the counters in the parameters (`struct malloc_par`), from the threshold for large blocks on. Version
/// 2.35 inserted fields for huge pages before them.
struct Places {
    counts: usize,
    bytes: usize,
}

const PLACES: Places = Places { counts: 24, bytes: 40 };
const PLACES_SINCE_35: Places = Places { counts: 44, bytes: 64 };
/// The version that added huge pages.
const HUGE_PAGES: u32 = 35;
/// Maximum number of block sizes in a thread's cache, and the largest of them without its header.
const MOST_SIZES: u64 = 64;
const LARGEST_CACHED: u64 = 1032;

/// Finds the parameters: where the main heap begins, and the number and bytes of blocks with mappings of their own.
/// `None` if nothing matches, or several places do.
fn parameters(bytes: &[u8], heap: Option<&Range<u64>>, page: u64, version: u32) -> Option<(u64, (u64, u64))> {
    let heap = heap?;
    let places = if version >= HUGE_PAGES { PLACES_SINCE_35 } else { PLACES };
    let number = |at: usize| word(bytes, at) as u32;
    let parameters = |at: usize| {
        let [threshold, arenas] = [0, 8].map(|field| word(bytes, at + field));
        let [count, most, highest, fixed] = [0, 4, 8, 12].map(|field| number(at + places.counts + field));
        let [sum, highest_sum, base, sizes, largest] =
            [0, 8, 16, 24, 32].map(|field| word(bytes, at + places.bytes + field));
        let are_limits = (1..1 << 47).contains(&threshold) && (1..1 << 20).contains(&arenas) && most <= i32::MAX as u32;
        let are_sizes = (1..=MOST_SIZES).contains(&sizes) && largest <= LARGEST_CACHED && fixed <= 1;
        let are_sums = count <= highest && sum <= highest_sum && sum.is_multiple_of(page) && sum / page >= count.into();
        let is_base = heap.contains(&base);
        let is_one = are_limits && are_sizes && are_sums && is_base && (count == 0) == (sum == 0);
        is_one.then_some((base, (count.into(), sum)))
    };
    let mut found = (0..bytes.len()).step_by(8).filter_map(parameters);
    let first = found.next()?;
    found.next().is_none().then_some(first)
}
