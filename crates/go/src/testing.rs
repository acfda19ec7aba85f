//! Made-up memory for tests.

use std::cell::RefCell;
use std::collections::BTreeMap;

use heapbpf_elf::Memory;

use crate::buckets::hash_of;

/// Memory in pieces, which may change after a number of reads.
#[derive(Default)]
pub(crate) struct MadeUp {
    pieces: BTreeMap<u64, Vec<u8>>,
    /// Changes: after this many reads, this address holds this number.
    changes: Vec<(usize, u64, u64)>,
    reads: RefCell<usize>,
}

impl MadeUp {
    /// Writes numbers to an address.
    pub(crate) fn put(&mut self, address: u64, numbers: &[u64]) {
        self.pieces.insert(address, numbers.iter().flat_map(|number| number.to_le_bytes()).collect());
    }

    /// Changes the number at an address after `reads` reads.
    pub(crate) fn change_after(&mut self, reads: usize, address: u64, number: u64) {
        self.changes.push((reads, address, number));
    }

    /// Writes a bucket to an address, with the counts of its four parts.
    pub(crate) fn bucket(&mut self, address: u64, next: u64, (size, stack): (u64, &[u64]), counts: [(u64, u64); 4]) {
        let header = [0, next, 1, hash_of(stack, size), size, stack.len() as u64];
        let counts = counts.into_iter().flat_map(|(allocs, frees)| [allocs, frees, allocs * size, frees * size]);
        let all: Vec<u64> = header.into_iter().chain(stack.iter().copied()).chain(counts).collect();
        self.put(address, &all);
    }
}

impl Memory for MadeUp {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        let reads = *self.reads.borrow();
        let Some((start, bytes)) = self.pieces.range(..=address).next_back() else { return false };
        let at = (address - start) as usize;
        let Some(found) = bytes.get(at..at + buffer.len()) else { return false };
        *self.reads.borrow_mut() += 1;
        buffer.copy_from_slice(found);
        for (_, changed, number) in self.changes.iter().filter(|(after, ..)| reads >= *after) {
            for (byte, place) in number.to_le_bytes().into_iter().zip(*changed..) {
                if let Some(there) = place.checked_sub(address).and_then(|at| buffer.get_mut(at as usize)) {
                    *there = byte;
                }
            }
        }
        true
    }
}
