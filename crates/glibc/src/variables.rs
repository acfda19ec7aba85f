//! Finds the main arena, the parameters and the cache key among the C library's variables. Stripped files have no
//! symbols for them.

use std::ops::Range;

use crate::Space;
use crate::arena::{BIN_MAP, BINS, NEXT, SIZE, SYSTEM, TOP};
use crate::pages::{Pages, word};

/// Maximum size of the variables that are read, bytes. A static program has all of its own variables there.
const MOST_BYTES: u64 = 4 << 20;
/// Maximum number of words that may be the key.
const MOST_KEYS: usize = 4096;
/// Number of lists of free blocks.
const LISTS: usize = 127;

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

/// Returns the offset of the main arena in `bytes`, which lie at `address`. Most of its lists are empty, and so point
/// to themselves.
fn main_arena(bytes: &[u8], address: u64) -> Option<usize> {
    let last = bytes.len().checked_sub(SIZE as usize)?;
    (0..=last).step_by(8).find(|at| is_arena(&bytes[*at..], address + *at as u64))
}

fn is_arena(bytes: &[u8], base: u64) -> bool {
    let (next, top, system) = (word(bytes, NEXT), word(bytes, TOP), word(bytes, SYSTEM));
    let is_address = |word: u64| word >= 4096 && word >> 47 == 0 && word.is_multiple_of(8);
    if !is_address(next) || !is_address(top) || !system.is_multiple_of(8) || word(bytes, SYSTEM + 8) < system {
        return false;
    }
    let mut empty = 0;
    for list in 0..LISTS {
        let at = BINS + 16 * list;
        // A list is linked as if it were the third and fourth word of a block, so it points 16 bytes before itself.
        let itself = base + at as u64 - 16;
        match [word(bytes, at), word(bytes, at + 8)] {
            links if links == [itself; 2] => empty += 1,
            links if links.contains(&itself) || !links.iter().all(|link| is_address(*link)) => return false,
            _ if list == 0 => {}
            _ => {
                // Its bit is set. The first lists are numbered from 1.
                let bit = list + 1;
                let bits = word(bytes, BIN_MAP + bit / 64 * 8);
                if bits >> (bit % 64) & 1 == 0 {
                    return false;
                }
            }
        }
    }
    empty > 0
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
