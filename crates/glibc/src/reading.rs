//! Reads one arena, and repeats that if it changes in the process. Fast bins are lists of small free blocks that are not
//! merged with their neighbours, and therefore look as if they were in use.

use crate::arena::{Arena, FAST_BINS, Region, Variables, Why};
use crate::pages::Pages;
use crate::types::Types;
use crate::walk::{BITS, Blocks, HEADER, Linked, Sums, walk};
use crate::{Heap, Space};

/// How often an arena or a list that changes while it is read is read again.
pub(crate) const ATTEMPTS: usize = 3;

/// The result of one attempt.
struct Attempt {
    sums: Sums,
    /// Bytes that were not read, and why.
    unread_bytes: u64,
    why: Why,
}

/// Settings for reading arenas.
pub(crate) struct How<'h> {
    pub(crate) space: &'h Space,
    /// Words that may be the key of cached blocks.
    pub(crate) keys: &'h [u64],
    /// Whether list links are mangled.
    pub(crate) is_mangled: bool,
}

/// Adds an arena to the heap, and to the sums of all arenas. `variables`: only for the main arena.
pub(crate) fn arena(
    pages: &mut Pages,
    base: u64,
    variables: Option<&Variables>,
    how: &How,
    (heap, all): (&mut Heap, &mut Sums),
    types: &mut Option<Types>,
) {
    let mut best: Option<Attempt> = None;
    for _ in 0..ATTEMPTS {
        let Some(arena) = Arena::read(pages, base) else { break };
        let regions = match variables {
            Some(variables) => arena.main_heap(pages, variables.sbrk_base, how.space.heap.as_ref()),
            None => arena.heaps(pages),
        };
        let attempt = match regions {
            Ok(regions) => attempt(pages, &arena, &regions, how, types),
            Err(why) => Attempt { sums: Sums::default(), unread_bytes: arena.system_bytes, why },
        };
        let (unread, why) = (attempt.unread_bytes, attempt.why);
        if best.as_ref().is_none_or(|best| unread < best.unread_bytes) {
            best = Some(attempt);
        }
        // Another attempt will not find absent memory either, unless the arena's top has changed.
        let mut is_same = || Arena::read(pages, base).is_some_and(|now| now.top == arena.top);
        if unread == 0 || why == Why::Absent && is_same() {
            break;
        }
        pages.forget();
    }
    let Some(Attempt { sums, unread_bytes, why }) = best else {
        // The arena has gone, and its size is not known.
        heap.is_moving = true;
        return;
    };
    let into = match why {
        Why::Absent => &mut heap.absent_unread_bytes,
        Why::Inconsistent => &mut heap.inconsistent_bytes,
    };
    *into = into.saturating_add(unread_bytes);
    heap.cached_bytes = heap.cached_bytes.saturating_add(sums.fast.bytes);
    heap.is_moving |= sums.is_moving;
    heap.doubtful_bytes = heap.doubtful_bytes.saturating_add(sums.doubtful_bytes);
    heap.resident_bytes = heap.resident_bytes.saturating_add(sums.resident_bytes);
    all.add(&sums);
}

fn attempt(pages: &mut Pages, arena: &Arena, regions: &[Region], how: &How, types: &mut Option<Types>) -> Attempt {
    let (mut sums, mut unread_bytes, mut why, mut known) = (Sums::default(), 0_u64, Why::Absent, 0_u64);
    for region in regions {
        if let Err(stop) = walk(pages, region, how.keys, &mut sums, types) {
            unread_bytes = unread_bytes.saturating_add(region.end.saturating_sub(stop.at));
            why = why.worst(stop.why);
        }
        sums.resident_bytes = sums.resident_bytes.saturating_add(pages.resident_bytes(&region.whole));
        known = known.saturating_add(region.whole.end - region.whole.start);
    }
    let elsewhere = arena.system_bytes.saturating_sub(known);
    if elsewhere > 0 {
        (unread_bytes, why) = (unread_bytes.saturating_add(elsewhere), why.worst(Why::Inconsistent));
    }
    let linked = how.is_mangled.then_some(&sums.linked);
    let lists = match cached(pages, arena, regions, linked).filter(|_| unread_bytes == 0) {
        Some(lists) => lists,
        // Nearly all blocks that look linked are in fast bins.
        None if how.is_mangled => {
            sums.is_moving = true;
            sums.linked.map(|it| it.blocks)
        }
        None => {
            sums.doubtful_bytes = sums.small_bytes;
            [Blocks::default(); FAST_BINS]
        }
    };
    sums.fast = lists.iter().fold(Blocks::default(), |sum, list| sum.with(*list));
    sums.tally.without_lists(&lists);
    sums.used = sums.used.without(sums.fast);
    Attempt { sums, unread_bytes, why }
}

/// Maximum number of blocks in a list.
const MOST_IN_LIST: u64 = 1 << 17;

/// Returns the blocks in each of an arena's fast bins; `None` if the lists make no sense or are too long. `linked`: the
/// blocks that the walk has found. If they make up the whole list, it need not be followed.
fn cached(
    pages: &mut Pages,
    arena: &Arena,
    regions: &[Region],
    linked: Option<&[Linked; FAST_BINS]>,
) -> Option<[Blocks; FAST_BINS]> {
    let mut lists = [Blocks::default(); FAST_BINS];
    for (list, first) in arena.fast.iter().enumerate() {
        let size = 32 + 16 * list as u64;
        let found = linked.map(|linked| linked[list]).filter(|found| found.are_list(*first));
        let mut follow = || (0..ATTEMPTS).find_map(|_| of_list(pages, *first, size, regions, linked.is_some()));
        lists[list] = found.map(|found| found.blocks).or_else(&mut follow)?;
    }
    Some(lists)
}

fn of_list(pages: &mut Pages, first: u64, size: u64, regions: &[Region], is_mangled: bool) -> Option<Blocks> {
    let (mut at, mut sum) = (first, Blocks::default());
    while at != 0 {
        let is_block =
            at.is_multiple_of(HEADER) && regions.iter().any(|region| (region.start..region.end).contains(&at));
        if !is_block || sum.count >= MOST_IN_LIST {
            return None;
        }
        let [_, head, link] = pages.words::<3>(at)?;
        if head & !BITS != size {
            return None;
        }
        sum.note(size);
        at = if is_mangled { link ^ ((at + HEADER) >> 12) } else { link };
    }
    Some(sum)
}
