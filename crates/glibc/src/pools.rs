//! Small objects of Python (up to 512 bytes), which do not come from glibc: CPython's allocator divides mappings of its own into pools of
//! blocks of one size (Objects/obmalloc.c, since 3.7). A pool's header says how many of its blocks are in use and lists the free ones, so
//! that both must agree.

use std::ops::Range;

use crate::Space;
use crate::pages::{Pages, word};
use crate::tally::Tally;
use crate::types::{Types, words_of};
use crate::walk::Blocks;

/// Size of a pool's header and of the smallest block, number of sizes, and sizes of pools (before 3.10, and since).
const HEADER: usize = 48;
const STEP: usize = 16;
const SIZES: usize = 32;
const POOLS: [usize; 2] = [4 << 10, 16 << 10];
const MOST_BLOCKS: usize = (POOLS[1] - HEADER) / STEP;
/// Bytes that are read at once, and how often a pool that changes meanwhile is.
const WINDOW: u64 = 256 << 10;
const ATTEMPTS: usize = 3;

/// What Python's allocator of small objects has of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pools {
    /// Number of pools with blocks in use.
    pub pools: u64,
    /// Blocks in use, and their sizes.
    pub inuse_blocks: u64,
    /// Their sizes.
    pub inuse_bytes: u64,
    /// Free blocks of these pools, and their headers, bytes.
    pub free_bytes: u64,
    /// Pools that made no sense, bytes.
    pub inconsistent_bytes: u64,
}

/// A pool, by its header.
#[derive(Clone, Copy)]
struct Pool {
    /// Its size, and that of its blocks.
    bytes: usize,
    size: usize,
    /// Blocks in use, and blocks that were in use at any time.
    used: usize,
    begun: usize,
    /// Address of the first free one.
    free: u64,
}

impl Pool {
    /// That of some bytes, which lie at an address.
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

    /// Which of its blocks are free; `None` if that is not as many as it says.
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

/// Counts the blocks in use of all pools.
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
            // The next window begins with it.
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

/// Reads the pages that are in memory; the others of a pool were never used, and are 0.
fn read_present(pages: &mut Pages, at: u64, buffer: &mut [u8]) {
    let page = pages.page_bytes;
    for (part, at) in buffer.chunks_mut(page as usize).zip((at..).step_by(page as usize)) {
        if !pages.read(at, part) {
            part.fill(0);
        }
    }
}

/// Counts the blocks of a pool. Returns whether it made sense.
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
