//! Counts of a census: blocks by type, and blocks without a type by size class.

use std::collections::HashMap;
use std::ops::RangeInclusive;

use crate::arena::FAST_BINS;
use crate::walk::{Blocks, HEADER};

/// Up to this size, each class holds one block size. Above, each class spans a power of two.
const LARGEST_EXACT: u64 = 0x410;
const EXACT: usize = (LARGEST_EXACT / HEADER - 1) as usize;
/// Maximum number of pairs of key and class. Blocks of further pairs count as in use.
const MOST_KEYED: usize = 1 << 10;

/// Returns the class of a block, by its size including the header.
#[inline]
fn class_of(bytes: u64) -> usize {
    match bytes {
        0..=LARGEST_EXACT => (bytes.saturating_sub(HEADER + 1) / HEADER) as usize,
        _ => EXACT + ((bytes - 1) >> 10).ilog2() as usize,
    }
}

/// Returns the requested sizes that lead to a block of this class.
pub(crate) fn sizes_of(class: usize) -> RangeInclusive<u64> {
    let largest = |class: usize| match class.checked_sub(EXACT) {
        None => HEADER * (class as u64 + 2),
        Some(power) => 1 << (11 + power),
    };
    match class.checked_sub(1) {
        None => 0..=largest(0) - 8,
        Some(below) => largest(below) - 7..=largest(class) - 8,
    }
}

/// Blocks by type, and those without a type by class.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    /// By type number.
    pub(crate) types: Vec<Blocks>,
    /// By class number.
    pub(crate) classes: Vec<Blocks>,
    /// The blocks in `classes` with a word that may be the cache key, by key and class.
    keyed: HashMap<(u64, usize), Blocks>,
}

#[inline]
fn at(blocks: &mut Vec<Blocks>, number: usize) -> &mut Blocks {
    if number >= blocks.len() {
        blocks.resize(number + 1, Blocks::default());
    }
    &mut blocks[number]
}

impl Tally {
    /// Counts a block.
    #[inline]
    pub(crate) fn note(&mut self, of_type: Option<u32>, bytes: u64) {
        match of_type {
            Some(number) => at(&mut self.types, number as usize).note(bytes),
            None => at(&mut self.classes, class_of(bytes)).note(bytes),
        }
    }

    /// Records the key of a block, which counts without a type.
    pub(crate) fn note_keyed(&mut self, key: u64, bytes: u64) {
        let place = (key, class_of(bytes));
        if self.keyed.len() < MOST_KEYED || self.keyed.contains_key(&place) {
            self.keyed.entry(place).or_default().note(bytes);
        }
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (sums, others) in [(&mut self.types, &other.types), (&mut self.classes, &other.classes)] {
            for (number, blocks) in others.iter().enumerate() {
                let sum = at(sums, number);
                *sum = sum.with(*blocks);
            }
        }
        for (place, blocks) in &other.keyed {
            let sum = self.keyed.entry(*place).or_default();
            *sum = sum.with(*blocks);
        }
    }

    fn without(&mut self, class: usize, blocks: Blocks) {
        if let Some(sum) = self.classes.get_mut(class) {
            *sum = sum.without(blocks);
        }
    }

    /// Subtracts the blocks in fast bins.
    pub(crate) fn without_lists(&mut self, lists: &[Blocks; FAST_BINS]) {
        lists.iter().enumerate().for_each(|(class, blocks)| self.without(class, *blocks));
    }

    /// Subtracts the blocks with the cache key.
    pub(crate) fn without_key(&mut self, key: u64) {
        for ((_, class), blocks) in std::mem::take(&mut self.keyed).into_iter().filter(|((of, _), _)| *of == key) {
            self.without(class, blocks);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_size_has_one_class_whose_sizes_say_what_was_asked_for() {
        let mut next = 0;
        for class in 0..80 {
            let sizes = sizes_of(class);
            assert_eq!(*sizes.start(), next, "{class}");
            next = sizes.end() + 1;
            for asked in [*sizes.start(), *sizes.end()] {
                let block = (asked + 8).next_multiple_of(HEADER).max(32);
                assert_eq!(class_of(block), class, "{asked}");
            }
        }
        assert_eq!((sizes_of(0), sizes_of(1), sizes_of(EXACT)), (0..=24, 25..=40, 1033..=2040));
        assert_eq!((class_of(0), class_of(u64::MAX)), (0, EXACT + 53));
    }
}
