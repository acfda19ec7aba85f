//! Large blocks, which have mappings of their own. The kernel merges mappings, so one mapping may contain several
//! blocks, and other memory as well.

use std::ops::Range;

use crate::arena::HEAP;
use crate::pages::{Pages, word};
use crate::pools;
use crate::tally::Tally;
use crate::types::{TYPE_WORDS, Types, words_of};
use crate::walk::{BITS, HEADER, MAPPED};
use crate::{Heap, Space};

/// Maximum number of pages at which to look for a block where none is known to begin.
const MOST_LOOKED_AT: u64 = 1 << 17;
/// Maximum number of blocks.
const MOST_BLOCKS: usize = 1 << 16;

/// Counts large blocks by type and size.
pub(crate) fn note(pages: &mut Pages, heap: &Heap, types: &mut Types, tally: &mut Tally) {
    for block in &heap.mapped {
        let mut words = [0; 8 * TYPE_WORDS];
        // Its first page was in memory.
        let is_read = pages.read(block.start + HEADER, &mut words);
        let found = if is_read { types.of(pages, &words_of(&words)) } else { None };
        tally.note(found, block.end - block.start);
    }
}

/// Adds blocks with mappings of their own. `known`: their number and bytes, if known.
pub(crate) fn add(pages: &mut Pages, space: &Space, arenas: &[u64], known: Option<(u64, u64)>, heap: &mut Heap) {
    let most =
        known.map_or(MOST_BLOCKS, |(count, _)| usize::try_from(count).map_or(MOST_BLOCKS, |it| it.min(MOST_BLOCKS)));
    let arena_heaps: Vec<u64> = arenas.iter().map(|base| base & !(HEAP - 1)).collect();
    let is_other = |range: &&Range<u64>| !arena_heaps.contains(&range.start) && space.heap.as_ref() != Some(*range);
    let ranges: Vec<&Range<u64>> = space.anonymous.iter().filter(is_other).collect();
    // Blocks from the start of each mapping.
    let mut found = Vec::new();
    for range in &ranges {
        blocks(pages, range, most, &mut found);
    }
    // Other blocks follow other memory.
    let mut left = MOST_LOOKED_AT;
    if known.is_some() {
        for range in &ranges {
            search(pages, range, most, &mut left, &mut found);
        }
    }
    found.sort_unstable_by_key(|block| block.start);
    let bytes = found.iter().fold(0, |sum: u64, block| sum.saturating_add(block.end - block.start));
    let (count, bytes_in_use) = known.unwrap_or((found.len() as u64, bytes));
    heap.mapped_is_known = known == Some((found.len() as u64, bytes));
    heap.inuse_blocks = heap.inuse_blocks.saturating_add(count);
    heap.inuse_bytes = heap.inuse_bytes.saturating_add(bytes_in_use);
    for block in &found {
        let present = pages.present_bytes(block);
        heap.resident_bytes = heap.resident_bytes.saturating_add(present);
        heap.absent_bytes = heap.absent_bytes.saturating_add(block.end - block.start - present);
    }
    heap.mapped = found;
}

/// Adds adjacent blocks from the start of a mapping.
fn blocks(pages: &mut Pages, range: &Range<u64>, most: usize, found: &mut Vec<Range<u64>>) {
    let mut at = range.start;
    while at < range.end && found.len() < most {
        let Some(block) = header(pages, at).and_then(|header| block(pages, &header, at, range)) else { break };
        at = block.end;
        found.push(block);
    }
}

/// Reads what is at the start of a page: the header of a block, or that of a pool.
fn header(pages: &mut Pages, at: u64) -> Option<[u8; pools::HEADER]> {
    let mut header = [0; pools::HEADER];
    pages.read(at, &mut header).then_some(header)
}

fn block(pages: &Pages, header: &[u8], at: u64, range: &Range<u64>) -> Option<Range<u64>> {
    let (before, head) = (word(header, 0), word(header, 8));
    let size = head & !BITS;
    let is_one = before == 0 && head & BITS == MAPPED && size > 0 && size.is_multiple_of(pages.page_bytes);
    let end = at.checked_add(size).filter(|end| is_one && *end <= range.end)?;
    Some(at..end)
}

/// Searches each page of a mapping for further blocks, except those of Python's pools.
fn search(pages: &mut Pages, range: &Range<u64>, most: usize, left: &mut u64, found: &mut Vec<Range<u64>>) {
    let known: Vec<Range<u64>> = found.iter().filter(|block| range.contains(&block.start)).cloned().collect();
    let mut at = known.last().map_or(range.start, |last| last.end);
    while at < range.end && found.len() < most && *left > 0 {
        *left -= 1;
        let header = header(pages, at);
        let block = header.and_then(|header| block(pages, &header, at, range));
        let end = match &block {
            Some(block) => block.end,
            None => header.and_then(|header| pools::end(&header, at)).unwrap_or(at.saturating_add(pages.page_bytes)),
        };
        found.extend(block);
        at = end;
    }
}
