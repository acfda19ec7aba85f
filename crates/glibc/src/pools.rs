//! Small Python objects (up to 512 bytes), which do not come from glibc. CPython's allocator divides mappings of its
//! own into pools of equal blocks (Objects/obmalloc.c, since 3.7). A pool's header has the number of blocks in use and
//! a list of the free ones. Both must agree.

use std::ops::Range;

use crate::Space;
use crate::arena::HEAP;
use crate::pages::{Pages, word};
use crate::tally::Tally;
use crate::types::{Types, words_of};
use crate::walk::Blocks;

/// Size of a pool's header.
pub(crate) const HEADER: usize = 48;
/// Smallest block, number of sizes, and pool sizes (before 3.10, and since).
const STEP: usize = 16;
const SIZES: usize = 32;
const POOLS: [usize; 2] = [4 << 10, 16 << 10];
const MOST_BLOCKS: usize = (POOLS[1] - HEADER) / STEP;
/// Number of bytes per read, and how often a pool that changes while it is read is read again.
const WINDOW: u64 = 256 << 10;
const ATTEMPTS: usize = 3;
/// Maximum number of ranges of pools that are listed. Neighbouring pools are in one range.
const MOST_RANGES: usize = 1 << 16;

/// The memory of Python's small-object allocator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pools {
    /// Number of pools with blocks in use.
    pub pools: u64,
    /// Number of blocks in use.
    pub inuse_blocks: u64,
    /// Sum of their sizes.
    pub inuse_bytes: u64,
    /// Free blocks and headers of these pools, bytes.
    pub free_bytes: u64,
    /// Pools with inconsistent contents, bytes.
    pub inconsistent_bytes: u64,
}

/// Python's arenas: the memory of its pools, which comes from mmap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PythonArenas {
    /// The pools with blocks in use.
    pub pools: Pools,
    /// Where pools are, also those whose blocks are all free again. In order, with neighbouring pools in one range.
    pub ranges: Vec<Range<u64>>,
    /// Their pages in memory, bytes.
    pub resident_bytes: u64,
}

/// What was found so far.
#[derive(Default)]
pub(crate) struct Found {
    pub(crate) pools: Pools,
    pub(crate) tally: Tally,
    ranges: Vec<Range<u64>>,
}

impl Found {
    /// Notes where a pool is.
    fn note_place(&mut self, place: Range<u64>) {
        if let Some(last) = self.ranges.last_mut().filter(|last| last.end == place.start) {
            last.end = place.end;
        } else if self.ranges.len() < MOST_RANGES {
            self.ranges.push(place);
        }
    }
}

/// A pool, by its header.
#[derive(Clone, Copy)]
struct Pool {
    /// Size of the pool, and of its blocks.
    bytes: usize,
    size: usize,
    /// Number of blocks in use, and number of blocks that have ever been in use.
    used: usize,
    begun: usize,
    /// Address of the first free block.
    free: u64,
}

impl Pool {
    /// Parses the header of a pool at address `at`; `None` if there is no pool, or if it was never used.
    fn parse(bytes: &[u8], at: u64) -> Option<Self> {
        let half = |at: usize| (word(bytes, at / 8 * 8) >> (at % 8 * 8)) as u32 as usize;
        let (used, class, next, last) = (half(0), half(36), half(40), half(44));
        let size = (class < SIZES).then_some((class + 1) * STEP)?;
        let pool_bytes = POOLS.into_iter().find(|bytes| *bytes == last.saturating_add(size))?;
        let begun = next.checked_sub(HEADER)? / size;
        let is_one = HEADER + begun * size == next
            && (1..=(pool_bytes - HEADER) / size).contains(&begun)
            && used <= begun
            && at.is_multiple_of(pool_bytes as u64);
        is_one.then_some(Self { bytes: pool_bytes, size, used, begun, free: word(bytes, 8) })
    }

    /// Returns which blocks are free; `None` if their number is not the one that the header implies.
    fn free(&self, bytes: &[u8], at: u64) -> Option<[bool; MOST_BLOCKS]> {
        let (mut free, mut next) = ([false; MOST_BLOCKS], self.free);
        for _ in self.used..self.begun {
            let offset = usize::try_from(next.checked_sub(at)?).ok()?.checked_sub(HEADER)?;
            let block = offset / self.size;
            if block >= self.begun || block * self.size != offset || std::mem::replace(&mut free[block], true) {
                return None;
            }
            next = word(bytes, HEADER + offset);
        }
        (next == 0).then_some(free)
    }
}

/// Returns where the pool with this header ends, if it is one.
pub(crate) fn end(header: &[u8], at: u64) -> Option<u64> {
    Pool::parse(header, at).map(|pool| at.saturating_add(pool.bytes as u64))
}

/// Finds Python's arenas. `bases`: the addresses of glibc's arenas; `large`: its large blocks. `None` if there is too
/// much memory to look at.
pub(crate) fn arenas(pages: &mut Pages, space: &Space, bases: &[u64], large: &[Range<u64>]) -> Option<PythonArenas> {
    let Found { pools, ranges, .. } = count(pages, space, (bases, large), &mut None);
    let resident_bytes = ranges.iter().fold(0, |sum: u64, range| sum.saturating_add(pages.present_bytes(range)));
    (!pages.is_spent()).then_some(PythonArenas { pools, ranges, resident_bytes })
}

/// Counts the blocks in use in all pools, by type if `types` is given. glibc's arenas (by their addresses, `bases`) and
/// its `large` blocks, in order, are left out.
pub(crate) fn count(
    pages: &mut Pages,
    space: &Space,
    (bases, large): (&[u64], &[Range<u64>]),
    types: &mut Option<Types>,
) -> Found {
    let mut found = Found::default();
    let is_other = |range: &&Range<u64>| !bases.iter().any(|base| base & !(HEAP - 1) == range.start);
    for range in space.anonymous.iter().filter(is_other) {
        let mut at = range.start;
        let first = large.partition_point(|block| block.end <= range.start);
        for block in large[first..].iter().take_while(|block| block.start < range.end) {
            of_range(pages, &(at..block.start), types, &mut found);
            at = at.max(block.end);
        }
        of_range(pages, &(at..range.end), types, &mut found);
    }
    found
}

fn of_range(pages: &mut Pages, range: &Range<u64>, types: &mut Option<Types>, found: &mut Found) {
    if range.is_empty() {
        return;
    }
    let (mut buffer, mut again) = (vec![0; WINDOW as usize], [0; POOLS[1]]);
    let (page, mut at) = (pages.page_bytes, range.start);
    while at < range.end {
        let length = pages.run(at, WINDOW.min(range.end - at));
        if length == 0 {
            // A mapping may be almost empty, and as large as the address space.
            at = pages.next_present(at, range.end);
            continue;
        }
        let bytes = &mut buffer[..length as usize];
        if !pages.read(at, bytes) {
            at = at.saturating_add(page);
            continue;
        }
        let start = at;
        while at < start + length {
            let here = &bytes[(at - start) as usize..];
            let Some(pool) = Pool::parse(here, at) else {
                at += page;
                continue;
            };
            let place = at..at.saturating_add(pool.bytes as u64).min(range.end);
            if pool.used == 0 {
                found.note_place(place);
                at += pool.bytes as u64;
                continue;
            }
            // The next window begins with this pool.
            if here.len() < pool.bytes && at > start {
                break;
            }
            found.note_place(place);
            let again = &mut again[..pool.bytes];
            let known = here.get(..pool.bytes).is_some_and(|whole| note(pages, types, (pool, whole, at), found));
            let is_known = known
                || (0..ATTEMPTS).any(|_| {
                    read_present(pages, at, again);
                    let pool = Pool::parse(again, at).filter(|now| now.bytes == pool.bytes && now.used > 0);
                    pool.is_some_and(|pool| note(pages, types, (pool, again, at), found))
                });
            found.pools.inconsistent_bytes += if is_known { 0 } else { pool.bytes as u64 };
            at += pool.bytes as u64;
        }
    }
}

/// Reads the pages that are in memory. The other pages of a pool were never used, and read as 0.
fn read_present(pages: &mut Pages, at: u64, buffer: &mut [u8]) {
    let page = pages.page_bytes;
    for (part, at) in buffer.chunks_mut(page as usize).zip((at..).step_by(page as usize)) {
        if !pages.read(at, part) {
            part.fill(0);
        }
    }
}

/// Counts the blocks of a pool. Returns whether the pool is consistent.
fn note(
    pages: &mut Pages,
    types: &mut Option<Types>,
    (pool, bytes, at): (Pool, &[u8], u64),
    found: &mut Found,
) -> bool {
    let Some(free) = pool.free(bytes, at) else { return false };
    let mut used = Blocks::default();
    for block in (0..pool.begun).filter(|block| !free[*block]) {
        let start = HEADER + block * pool.size;
        let words = words_of(&bytes[start..start + pool.size]);
        used.note(pool.size as u64);
        let of_type = types.as_mut().and_then(|types| types.python(pages, &words));
        found.tally.note(of_type, pool.size as u64);
    }
    found.pools.pools += 1;
    found.pools.inuse_blocks += used.count;
    found.pools.inuse_bytes += used.bytes;
    found.pools.free_bytes += pool.bytes as u64 - used.bytes;
    true
}
