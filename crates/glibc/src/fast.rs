//! Lists of small free blocks that are not merged with their neighbours, and so look as if they were in use.

use crate::arena::{Arena, FAST_BINS, Region};
use crate::pages::Pages;
use crate::walk::{BITS, Blocks, HEADER, Linked};

/// Most blocks of an arena's lists.
const MOST: u64 = 1 << 17;
/// How often a list is read that changes meanwhile.
const ATTEMPTS: usize = 3;

/// The blocks in an arena's lists; `None` if they make no sense, or are very many. `linked`: those that the walk has found. If they are
/// the whole of a list, it need not be followed.
pub(crate) fn cached(
    pages: &mut Pages,
    arena: &Arena,
    regions: &[Region],
    linked: Option<&[Linked; FAST_BINS]>,
) -> Option<Blocks> {
    let (mut sum, is_mangled) = (Blocks::default(), linked.is_some());
    for (list, first) in arena.fast.iter().enumerate() {
        let size = 32 + 16 * list as u64;
        if let Some(found) = linked.map(|linked| linked[list]).filter(|found| found.are_list(*first)) {
            sum = sum.with(found.blocks);
            continue;
        }
        let before = sum;
        let mut is_read = false;
        for _ in 0..ATTEMPTS {
            sum = before;
            is_read = add(pages, *first, size, regions, is_mangled, &mut sum).is_some();
            if is_read || *first == 0 {
                break;
            }
        }
        if !is_read {
            return None;
        }
    }
    Some(sum)
}

fn add(pages: &mut Pages, first: u64, size: u64, regions: &[Region], is_mangled: bool, sum: &mut Blocks) -> Option<()> {
    let mut at = first;
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
    Some(())
}
