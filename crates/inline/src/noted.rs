//! Blocks that are sampled already when an allocator is hooked: what a blob holds so that it reports their frees.

use std::collections::BTreeMap;

use crate::abi::{BUCKET_BYTES, FILTER, FILTER_BYTES, SET, WINDOW_BYTES};

/// The same multiplier as in the blob's `window`.
const HASH: u64 = 0x9e37_79b9_7f4a_7c15;
/// Bytes of an entry of the set.
const ENTRY_BYTES: u64 = 8;

/// What is to be written to a new blob whose set has 2^`set_log2` entries: offsets from its base, and bytes. `None` if there is no
/// room for one of the blocks.
#[must_use]
pub fn noted(blocks: &[u64], set_log2: u32) -> Option<Vec<(u64, Vec<u8>)>> {
    let mask = (ENTRY_BYTES << set_log2) - BUCKET_BYTES;
    let mut set = BTreeMap::new();
    let mut filter: BTreeMap<u64, u8> = BTreeMap::new();
    for &block in blocks {
        let first = SET + ((block.wrapping_mul(HASH) >> 32) & mask);
        let window = (first..first + WINDOW_BYTES).step_by(ENTRY_BYTES as usize);
        let place = window.clone().find(|at| set.get(at) == Some(&block));
        if place.is_some() {
            continue;
        }
        set.insert(window.into_iter().find(|at| !set.contains_key(at))?, block);
        let class = u64::from((block >> 22) as u32 ^ (block >> 4) as u32) & (FILTER_BYTES - 1);
        let count = filter.entry(FILTER + class).or_default();
        *count = count.saturating_add(1);
    }
    let set = set.into_iter().map(|(at, block)| (at, block.to_ne_bytes().to_vec()));
    Some(set.chain(filter.into_iter().map(|(at, count)| (at, vec![count]))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_block_is_in_its_window_and_counted_once() {
        let blocks = [0x7f00_1234_5670, 0x7f00_1234_5670, 0x5555_0000_0010];
        let written = noted(&blocks, 16).expect("there is room");
        let entries: Vec<&(u64, Vec<u8>)> = written.iter().filter(|(at, _)| *at >= SET).collect();
        assert_eq!(entries.len(), 2);
        assert_eq!(written.iter().filter(|(at, count)| *at < SET && count == &[1]).count(), 2);
        assert!(written.iter().all(|(at, _)| (FILTER..crate::abi::mapped_bytes(16)).contains(at)));
    }

    #[test]
    fn what_has_no_room_is_refused() {
        let blocks: Vec<u64> = (1..2000).map(|index| index * 16).collect();
        assert_eq!(noted(&blocks, 10), None);
    }
}
