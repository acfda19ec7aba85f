//! Blocks that are already sampled when an allocator is hooked: data for a blob, so that it reports their frees.

use std::collections::BTreeMap;

use crate::abi::{BUCKET_BYTES, ENTRY_BYTES, FILTER, FILTER_BYTES, SET, WINDOW_BYTES};

/// The same multiplier as in the blob's `window`.
const HASH: u64 = 0x9e37_79b9_7f4a_7c15;

/// What to write to a new blob whose set has 2^`set_log2` entries, before any jump leads to it, so that it knows these
/// blocks: offsets from the base, and bytes. `None` if there is no space for one of them.
///
/// Some blocks may have been freed since they were sampled. Their free is then reported once more, and the programs
/// find no such block.
#[must_use]
pub fn writes(set_log2: u32, blocks: &[u64]) -> Option<Vec<(u64, Vec<u8>)>> {
    let mask = (ENTRY_BYTES << set_log2) - BUCKET_BYTES;
    let (mut set, mut filter) = (BTreeMap::<u64, u64>::new(), BTreeMap::<u64, u8>::new());
    for &block in blocks {
        let first = SET + ((block.wrapping_mul(HASH) >> 32) & mask);
        let window = (first..first + WINDOW_BYTES).step_by(ENTRY_BYTES as usize);
        if window.clone().any(|at| set.get(&at) == Some(&block)) {
            continue;
        }
        let at = window.into_iter().find(|at| !set.contains_key(at))?;
        set.insert(at, block);
        let class = u64::from((block >> 22) as u32 ^ (block >> 4) as u32) & (FILTER_BYTES - 1);
        let count = filter.entry(FILTER + class).or_default();
        *count = count.saturating_add(1);
    }
    let entries = set.into_iter().map(|(at, block)| (at, block.to_ne_bytes().to_vec()));
    Some(entries.chain(filter.into_iter().map(|(at, count)| (at, vec![count]))).collect())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_block_is_in_its_window_and_counted_once() {
        let blocks = [0x7f00_1234_5670, 0x7f00_1234_5670, 0x5555_0000_0010];
        let written = writes(16, &blocks).expect("there is space");
        let entries: Vec<&(u64, Vec<u8>)> = written.iter().filter(|(at, _)| *at >= SET).collect();
        assert_eq!(entries.len(), 2);
        assert_eq!(written.iter().filter(|(at, count)| *at < SET && count == &[1]).count(), 2);
        assert!(written.iter().all(|(at, _)| (FILTER..crate::abi::mapped_bytes(16)).contains(at)));
    }

    #[test]
    fn pages_are_in_many_classes_and_neighbours_side_by_side() {
        let class = |block: u64| {
            let written = writes(16, &[block]).expect("there is space");
            written.iter().map(|(at, _)| *at).find(|at| *at < SET).expect("a byte of the filter")
        };
        let pages: BTreeSet<u64> = (0..1 << 15).map(|page| class(0x7f12_0000_0010 + (page << 12))).collect();
        assert_eq!(pages.len(), 1 << 15);
        assert_eq!(class(0x7f12_0000_0410) ^ class(0x7f12_0000_0400), 1);
    }

    #[test]
    fn what_has_no_space_is_refused() {
        let blocks: Vec<u64> = (1..2000).map(|index| index * 16).collect();
        assert_eq!(writes(10, &blocks), None);
    }
}
