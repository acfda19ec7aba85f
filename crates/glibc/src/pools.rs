//! Small Python objects (up to 512 bytes), which do not come from glibc. CPython's allocator divides mappings of its
//! own into pools of equal blocks (Objects/obmalloc.c, since 3.7). A pool's header has the number of blocks in use and
//! a list of the free ones. Both must agree.

use std::ops::Range;

use crate::Space;
use crate::pages::{Pages, word};
use crate::tally::Tally;
use crate::types::{Types, words_of};
use crate::walk::Blocks;

/// Size of a pool's header, smallest block, number of sizes, and pool sizes (before 3.10, and since).
const HEADER: usize = 48;
const STEP: usize = 16;
const SIZES: usize = 32;
const POOLS: [usize; 2] = [4 << 10, 16 << 10];
const MOST_BLOCKS: usize = (POOLS[1] - HEADER) / STEP;
/// Number of bytes per read, and how often a pool that changes while it is read is read again.
const WINDOW: u64 = 256 << 10;
const ATTEMPTS: usize = 3;

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
    /// Parses the header of a pool at address `at`; `None` if there is no pool.
    fn parse(bytes: &[u8], at: u64) -> Option<Self> {
        let half = |at: usize| (word(bytes, at / 8 * 8) >> (at % 8 * 8)) as u32 as usize;
        let (used, class, next, last) = (half(0), half(36), half(40), half(44));
        let size = (class < SIZES).then_some((class + 1) * STEP)?;
        let pool_bytes = POOLS.into_iter().find(|bytes| *bytes == last.saturating_add(size))?;
        let begun = next.checked_sub(HEADER)? / size;
        let is_one = HEADER + begun * size == next
            && begun <= (pool_bytes - HEADER) / size
            && (1..=begun).contains(&used)
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

/// Counts the blocks in use in all pools.
pub(crate) fn count(pages: &mut Pages, space: &Space, heaps: &[u64], types: &mut Types) -> (Pools, Tally) {
    let (mut pools, mut tally) = (Pools::default(), Tally::default());
    let is_other = |range: &&Range<u64>| !heaps.contains(&range.start);
    for range in space.anonymous.iter().filter(is_other) {
        of_range(pages, range, types, (&mut pools, &mut tally));
    }
    (pools, tally)
}

fn of_range(pages: &mut Pages, range: &Range<u64>, types: &mut Types, sums: (&mut Pools, &mut Tally)) {
    let (pools, tally) = sums;
    let (mut buffer, mut again) = (vec![0; WINDOW as usize], [0; POOLS[1]]);
    let (page, mut at) = (pages.page_bytes, range.start);
    while at < range.end {
        let length = pages.run(at, WINDOW.min(range.end - at));
        let bytes = &mut buffer[..length as usize];
        if length == 0 || !pages.read(at, bytes) {
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
            // The next window begins with this pool.
            if here.len() < pool.bytes && at > start {
                break;
            }
            let again = &mut again[..pool.bytes];
            let known = here.get(..pool.bytes).is_some_and(|whole| note(pages, types, (pool, whole, at), pools, tally));
            let is_known = known
                || (0..ATTEMPTS).any(|_| {
                    read_present(pages, at, again);
                    let pool = Pool::parse(again, at).filter(|now| now.bytes == pool.bytes);
                    pool.is_some_and(|pool| note(pages, types, (pool, again, at), pools, tally))
                });
            pools.inconsistent_bytes += if is_known { 0 } else { pool.bytes as u64 };
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
    types: &mut Types,
    (pool, bytes, at): (Pool, &[u8], u64),
    pools: &mut Pools,
    tally: &mut Tally,
) -> bool {
    let Some(free) = pool.free(bytes, at) else { return false };
    let mut used = Blocks::default();
    for block in (0..pool.begun).filter(|block| !free[*block]) {
        let start = HEADER + block * pool.size;
        let words = words_of(&bytes[start..start + pool.size]);
        used.note(pool.size as u64);
        tally.note(types.python(pages, &words), pool.size as u64);
    }
    pools.pools += 1;
    pools.inuse_blocks += used.count;
    pools.inuse_bytes += used.bytes;
    pools.free_bytes += pool.bytes as u64 - used.bytes;
    true
}
