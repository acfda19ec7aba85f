//! Blocks that are already sampled when an allocator is hooked: data for a blob, so that it reports their frees.

use std::collections::{BTreeSet, HashMap};

use crate::abi::{BUCKET_BYTES, ENTRY_BYTES, FILTER, FILTER_BYTES, SET, WINDOW_BYTES};

/// The same multiplier as in the blob's `window`.
const HASH: u64 = 0x9e37_79b9_7f4a_7c15;

/// What is written to a new blob before any jump leads to it. Further blocks may be added.
#[derive(Clone, Debug)]
pub struct Noted {
    /// Entries by their offset.
    set: HashMap<u64, u64>,
    filter: HashMap<u64, u8>,
    mask: u64,
}

impl Noted {
    /// For a blob whose set has 2^`set_log2` entries.
    #[must_use]
    pub fn new(set_log2: u32) -> Self {
        Self { set: HashMap::new(), filter: HashMap::new(), mask: (ENTRY_BYTES << set_log2) - BUCKET_BYTES }
    }

    /// Adds blocks, and returns what to write for them: offsets from the base, and bytes. `None` if there is no space
    /// for one of them.
    pub fn add(&mut self, blocks: &[u64]) -> Option<Vec<(u64, Vec<u8>)>> {
        let mut written = Vec::new();
        let mut classes = BTreeSet::new();
        for &block in blocks {
            let first = SET + ((block.wrapping_mul(HASH) >> 32) & self.mask);
            let window = (first..first + WINDOW_BYTES).step_by(ENTRY_BYTES as usize);
            if window.clone().any(|at| self.set.get(&at) == Some(&block)) {
                continue;
            }
            let at = window.into_iter().find(|at| !self.set.contains_key(at))?;
            self.set.insert(at, block);
            written.push((at, block.to_ne_bytes().to_vec()));
            let class = u64::from((block >> 22) as u32 ^ (block >> 4) as u32) & (FILTER_BYTES - 1);
            let count = self.filter.entry(FILTER + class).or_default();
            *count = count.saturating_add(1);
            classes.insert(FILTER + class);
        }
        written.extend(classes.into_iter().map(|at| (at, vec![self.filter[&at]])));
        Some(written)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn each_block_is_in_its_window_and_counted_once() {
        let blocks = [0x7f00_1234_5670, 0x7f00_1234_5670, 0x5555_0000_0010];
        let written = Noted::new(16).add(&blocks).expect("there is space");
        let entries: Vec<&(u64, Vec<u8>)> = written.iter().filter(|(at, _)| *at >= SET).collect();
        assert_eq!(entries.len(), 2);
        assert_eq!(written.iter().filter(|(at, count)| *at < SET && count == &[1]).count(), 2);
        assert!(written.iter().all(|(at, _)| (FILTER..crate::abi::mapped_bytes(16)).contains(at)));
    }

    #[test]
    fn pages_are_in_many_classes_and_neighbours_side_by_side() {
        let class = |block: u64| {
            let written = Noted::new(16).add(&[block]).expect("there is space");
            written.iter().map(|(at, _)| *at).find(|at| *at < SET).expect("a byte of the filter")
        };
        let pages: BTreeSet<u64> = (0..1 << 15).map(|page| class(0x7f12_0000_0010 + (page << 12))).collect();
        assert_eq!(pages.len(), 1 << 15);
        assert_eq!(class(0x7f12_0000_0410) ^ class(0x7f12_0000_0400), 1);
    }

    #[test]
    fn what_has_no_space_is_refused() {
        let blocks: Vec<u64> = (1..2000).map(|index| index * 16).collect();
        assert_eq!(Noted::new(10).add(&blocks), None);
    }
    #[test]
    fn what_is_added_later_has_places_of_its_own() {
        let blocks: Vec<u64> = (1..300).map(|index| index * 16).collect();
        let mut noted = Noted::new(16);
        let mut added: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
        for some in blocks.chunks(7) {
            added.extend(noted.add(some).expect("there is space"));
        }
        let at_once: BTreeMap<u64, Vec<u8>> =
            Noted::new(16).add(&blocks).expect("there is space").into_iter().collect();
        assert_eq!(added, at_once);
        assert_eq!(noted.add(&blocks), Some(Vec::new()), "they are known");
    }
}
