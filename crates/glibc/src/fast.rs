//! Fast bins: lists of small free blocks that are not merged with their neighbours, and therefore look as if they were
//! in use.

use crate::arena::{Arena, FAST_BINS, Region};
use crate::pages::Pages;
use crate::walk::{BITS, Blocks, HEADER, Linked};

/// Maximum number of blocks in a list.
const MOST: u64 = 1 << 17;
/// How often a list that changes while it is read is read again.
const ATTEMPTS: usize = 3;

/// Returns the blocks in each of an arena's fast bins; `None` if the lists make no sense or are too long. `linked`: the
/// blocks that the walk has found. If they make up the whole list, it need not be followed.
pub(crate) fn cached(
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
        if !is_block || sum.count >= MOST {
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
