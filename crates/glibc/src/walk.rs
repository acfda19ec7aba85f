//! Walks the blocks of a region, from each block to the next by its size.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use crate::arena::{FAST_BINS, Region, Why};
use crate::pages::{Pages, word};
use crate::tally::Tally;
use crate::types::{TYPE_WORDS, Types, words_of};

/// Flag bits in a block's size: the previous block is in use, the block has its own mapping, it is not in the main
/// arena.
pub(crate) const PREVIOUS_IN_USE: u64 = 1;
pub(crate) const MAPPED: u64 = 2;
const OTHER_ARENA: u64 = 4;
pub(crate) const BITS: u64 = 7;
/// Size of a block's header, which is part of the block's size, and the smallest block size.
pub(crate) const HEADER: u64 = 16;
const SMALLEST: u64 = 32;
/// End of the words of a block that are examined.
const WORDS_END: u64 = HEADER + 8 * TYPE_WORDS as u64;
/// The largest block that a thread cache takes (before 2.42), and the number of bytes that glibc keeps at the start of
/// a free block that it returns to the system.
const LARGEST_CACHED: u64 = 0x410;
const LINKS: u64 = 48;
/// Number of bytes per read.
const WINDOW: u64 = 256 << 10;
/// Number of places that a walk can go back to, and maximum number of retries.
const MOST_PLACES: usize = 32;
const MOST_FAILED: usize = 128;

/// A number of blocks, and their sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Blocks {
    pub(crate) count: u64,
    pub(crate) bytes: u64,
}

impl Blocks {
    pub(crate) fn note(&mut self, bytes: u64) {
        self.count += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }

    pub(crate) const fn without(self, some: Self) -> Self {
        Self { count: self.count.saturating_sub(some.count), bytes: self.bytes.saturating_sub(some.bytes) }
    }

    pub(crate) const fn with(self, some: Self) -> Self {
        Self { count: self.count.saturating_add(some.count), bytes: self.bytes.saturating_add(some.bytes) }
    }
}

/// Blocks of one size that look as if they were in a fast bin: their first word may be a mangled link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Linked {
    pub(crate) blocks: Blocks,
    /// Sums of their addresses and of the addresses that they link to: by addition and by exclusive or.
    addresses: [u64; 2],
    links: [u64; 2],
}

impl Linked {
    fn note(&mut self, at: u64, next: u64, bytes: u64) {
        self.blocks.note(bytes);
        for (sums, address) in [(&mut self.addresses, at), (&mut self.links, next)] {
            *sums = [sums[0].wrapping_add(address), sums[1] ^ address];
        }
    }

    /// Whether these blocks are exactly the list that begins with `first`: then each address except the first one is
    /// linked to once.
    pub(crate) const fn are_list(&self, first: u64) -> bool {
        self.addresses[0] == self.links[0].wrapping_add(first) && self.addresses[1] == self.links[1] ^ first
    }
}

/// Sums over the blocks of an arena.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sums {
    /// Blocks in use, or in a cache.
    pub(crate) used: Blocks,
    /// The part of these bytes that is not in memory.
    pub(crate) used_absent_bytes: u64,
    /// The part of these bytes in blocks that a cache may hold.
    pub(crate) small_bytes: u64,
    /// The part of these blocks with a possible key, by key.
    keyed: HashMap<u64, Blocks>,
    /// The part of these blocks without a key that may be in fast bins, by size.
    pub(crate) linked: [Linked; FAST_BINS],
    /// Blocks in fast bins.
    pub(crate) fast: Blocks,
    pub(crate) free_bytes: u64,
    pub(crate) free_resident_bytes: u64,
    pub(crate) trimmable_bytes: u64,
    pub(crate) resident_bytes: u64,
    pub(crate) doubtful_bytes: u64,
    /// Whether `fast` counts the blocks that look as if they were in fast bins, because the lists were changing.
    pub(crate) is_moving: bool,
    /// Blocks in use, or in a cache, by type and size; empty without a census.
    pub(crate) tally: Tally,
}

impl Sums {
    pub(crate) fn add(&mut self, other: &Self) {
        for (key, blocks) in &other.keyed {
            let of_key = self.keyed.entry(*key).or_default();
            *of_key = of_key.with(*blocks);
        }
        self.used = self.used.with(other.used);
        self.tally.add(&other.tally);
        for (sum, more) in [
            (&mut self.used_absent_bytes, other.used_absent_bytes),
            (&mut self.small_bytes, other.small_bytes),
            (&mut self.free_bytes, other.free_bytes),
            (&mut self.free_resident_bytes, other.free_resident_bytes),
            (&mut self.trimmable_bytes, other.trimmable_bytes),
        ] {
            *sum = sum.saturating_add(more);
        }
    }

    /// Returns the cache key and the blocks in caches. The key is the one that most blocks have.
    pub(crate) fn cached(&self) -> (u64, Blocks) {
        let cached = self.keyed.iter().max_by_key(|(_, blocks)| blocks.count);
        cached.map_or((0, Blocks::default()), |(key, blocks)| (*key, *blocks))
    }
}

/// Where a walk stopped early, and why.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stop {
    pub(crate) at: u64,
    pub(crate) why: Why,
}

/// A block whose state is in the header of the next one.
#[derive(Clone, Copy)]
struct Block {
    at: u64,
    bytes: u64,
    /// Its words after the header; 0 for those that are not in memory.
    words: [u64; TYPE_WORDS],
}

/// A place that a walk has reached.
#[derive(Clone)]
struct Place {
    at: u64,
    pending: Option<Block>,
    sums: Sums,
}

/// Adds the blocks of a region to the sums, also those before an error.
///
/// Blocks may be merged or split while others are read. Then the next place may no longer be the start of a block, so
/// the walk goes back by one place or more. With `types`, it also counts blocks by type and size.
pub(crate) fn walk(
    pages: &mut Pages,
    region: &Region,
    keys: &[u64],
    sums: &mut Sums,
    types: &mut Option<Types>,
) -> Result<(), Stop> {
    let mut buffer = vec![0; WINDOW as usize];
    let mut places: VecDeque<Place> = VecDeque::with_capacity(MOST_PLACES);
    let (mut here, mut failed) = (Place { at: region.start, pending: None, sums: sums.clone() }, 0);
    while here.at < region.end {
        let length = pages.run(here.at, WINDOW.min(region.end - here.at)) & !7;
        let bytes = &mut buffer[..length as usize];
        if length < HEADER || !pages.read(here.at, bytes) {
            *sums = here.sums;
            return Err(Stop { at: here.at, why: Why::Absent });
        }
        let mut walked = Walk { pages, region, keys, types, here: here.clone() };
        if walked.window(bytes).is_ok() {
            let walked = walked.here;
            if places.len() == MOST_PLACES {
                places.pop_front();
            }
            places.push_back(std::mem::replace(&mut here, walked));
            continue;
        }
        failed += 1;
        if failed > MOST_FAILED {
            // The blocks up to here made sense.
            let Place { at, sums: so_far, .. } = walked.here;
            *sums = so_far;
            return Err(Stop { at, why: Why::Inconsistent });
        }
        // The first retry reads the same place again.
        if failed % 2 == 0
            && let Some(before) = places.pop_back()
        {
            here = before;
        }
    }
    *sums = here.sums;
    Ok(())
}

struct Walk<'w, 'm, 'f> {
    pages: &'w mut Pages<'m>,
    region: &'w Region,
    keys: &'w [u64],
    types: &'w mut Option<Types<'f>>,
    here: Place,
}

impl Walk<'_, '_, '_> {
    /// Processes the blocks whose headers are in `bytes`, which begin at the next block.
    fn window(&mut self, bytes: &[u8]) -> Result<(), ()> {
        let start = self.here.at;
        while self.here.at < self.region.end {
            let Ok(offset) = usize::try_from(self.here.at - start) else { return Ok(()) };
            // A block's links may be cut off at the end of the present memory, but its header must not be.
            let wanted = if self.region.end - self.here.at >= WORDS_END { WORDS_END } else { HEADER };
            let rest = bytes.get(offset..).unwrap_or_default();
            if rest.len() < wanted as usize && (offset > 0 || rest.len() < HEADER as usize) {
                return Ok(());
            }
            let (before, head) = (word(rest, 0), word(rest, 8));
            self.settle(before, head & PREVIOUS_IN_USE != 0)?;
            let size = head & !BITS;
            if self.region.ends_with_fence && size <= HEADER && self.region.end - self.here.at <= 2 * HEADER {
                self.here.at = self.region.end;
                return Ok(());
            }
            let end = self.here.at.checked_add(size).filter(|end| *end <= self.region.end).ok_or(())?;
            let is_other = head & OTHER_ARENA != 0 && self.region.is_main;
            if size < SMALLEST || !size.is_multiple_of(HEADER) || head & MAPPED != 0 || is_other {
                return Err(());
            }
            if end == self.region.end {
                if self.region.ends_with_fence {
                    return Err(());
                }
                self.rest_is_free(size);
                self.here.at = end;
                return Ok(());
            }
            // The last word of a block is the first word of the next header.
            let data = usize::try_from(size + 8).map_or(rest.len(), |end| end.min(rest.len()));
            let words = words_of(rest.get(HEADER as usize..data).unwrap_or_default());
            self.here.pending = Some(Block { at: self.here.at, bytes: size, words });
            self.here.at = end;
        }
        Ok(())
    }

    /// Counts the previous block, now that it is known whether it is in use.
    fn settle(&mut self, size_before: u64, in_use: bool) -> Result<(), ()> {
        let Some(block) = self.here.pending else { return Ok(()) };
        let range = block.at..block.at + block.bytes;
        // Its first page and the page after it were read.
        let present = match block.bytes <= self.pages.page_bytes {
            true => block.bytes,
            false => self.pages.present_bytes(&range),
        };
        if !in_use {
            if size_before != block.bytes {
                return Err(());
            }
            self.here.sums.free_bytes += block.bytes;
            self.here.sums.free_resident_bytes += present;
            self.here.sums.trimmable_bytes += self.whole_pages(block.at + LINKS..range.end);
        } else {
            self.here.sums.used.note(block.bytes);
            self.here.sums.used_absent_bytes += block.bytes - present;
            self.here.sums.small_bytes += if block.bytes <= LARGEST_CACHED { block.bytes } else { 0 };
            let is_listed = self.note_links(&block);
            if let Some(types) = self.types {
                let found = if is_listed { None } else { types.of(self.pages, &block.words) };
                self.here.sums.tally.note(found, block.bytes);
            }
        }
        self.here.pending = None;
        Ok(())
    }

    /// Records whether a block may be in a cache or a fast bin. In a thread cache, its first word is the mangled
    /// address of the next block, and its second word is the key. In a fast bin, there is only the link. Returns
    /// whether the block may be in one of them.
    fn note_links(&mut self, block: &Block) -> bool {
        let [link, key, ..] = block.words;
        if block.bytes > LARGEST_CACHED {
            return false;
        }
        let next = link ^ ((block.at + HEADER) >> 12);
        if !next.is_multiple_of(HEADER) || next >> 47 != 0 {
            return false;
        }
        let sums = &mut self.here.sums;
        if key >> 48 != 0 && self.keys.binary_search(&key).is_ok() {
            sums.keyed.entry(key).or_default().note(block.bytes);
            if self.types.is_some() {
                sums.tally.note_keyed(key, block.bytes);
            }
            return true;
        }
        let list = (block.bytes / HEADER).checked_sub(2).and_then(|list| sums.linked.get_mut(list as usize));
        let list = list.filter(|_| next == 0 || self.region.arena.contains(&next));
        list.map(|list| list.note(block.at, next, block.bytes)).is_some()
    }

    /// Counts the last block of an arena, which is never in use.
    fn rest_is_free(&mut self, bytes: u64) {
        let range = self.here.at..self.region.end;
        self.here.sums.free_bytes += bytes;
        self.here.sums.free_resident_bytes += self.pages.present_bytes(&range);
        // Only the main arena's top block is returned to the system, except for a block of the smallest size.
        let given = bytes.saturating_sub(SMALLEST + 1) / self.pages.page_bytes * self.pages.page_bytes;
        if self.region.is_main {
            self.here.sums.trimmable_bytes += self.whole_pages(range.end - given..range.end);
        }
    }

    /// Returns how many bytes are in memory in the pages that lie entirely in a range.
    fn whole_pages(&mut self, range: Range<u64>) -> u64 {
        let page = self.pages.page_bytes;
        let (start, end) = (range.start.next_multiple_of(page), range.end / page * page);
        if start < end { self.pages.present_bytes(&(start..end)) } else { 0 }
    }
}
