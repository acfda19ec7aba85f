//! A made-up process for tests: variables, a main heap, another arena with two heaps, and large blocks.

use std::collections::HashMap;

use crate::arena::{BINS, NEXT, SIZE, SYSTEM, TOP};
use crate::{Memory, Space};

pub(crate) const PAGE: u64 = 4096;
pub(crate) const DATA: u64 = 0x7f00_0000_0000;
pub(crate) const MAIN: u64 = DATA + 0x400;
const PARAMETERS: u64 = DATA + 0x2000;
pub(crate) const KEY: u64 = 0xdead_beef_0123_4567;
/// The heap begins within a page, as in static programs.
pub(crate) const HEAP: u64 = 0x5500_0000_0d40;
/// Two heaps of another arena.
pub(crate) const FIRST: u64 = 0x7e00_0000_0000;
pub(crate) const SECOND: u64 = 0x7e00_0800_0000;
pub(crate) const OTHER: u64 = FIRST + 0x30;
pub(crate) const LARGE: u64 = 0x7d00_0000_0000;
pub(crate) const SIZE_OF_HEAPS: u64 = 0x21000;

/// The memory. Pages that were never written to are absent.
#[derive(Clone, Default)]
pub(crate) struct Process {
    pub(crate) pages: HashMap<u64, Vec<u8>>,
    /// New contents of pages, from the second read of a page on.
    pub(crate) later: HashMap<u64, Vec<u8>>,
    pub(crate) reads: u64,
}

impl Process {
    pub(crate) fn put(&mut self, address: u64, word: u64) {
        let page = self.pages.entry(address / PAGE).or_insert_with(|| vec![0; PAGE as usize]);
        let at = (address % PAGE) as usize;
        page[at..at + 8].copy_from_slice(&word.to_le_bytes());
    }

    /// Adds an arena with empty lists.
    fn arena(&mut self, base: u64, next: u64, top: u64, system: u64) {
        for list in 0..127 {
            let at = base + BINS as u64 + 16 * list;
            self.put(at, at - 16);
            self.put(at + 8, at - 16);
        }
        for (field, word) in [(TOP, top), (NEXT, next), (SYSTEM, system), (SYSTEM + 8, system)] {
            self.put(base + field as u64, word);
        }
    }

    /// Adds adjacent blocks, given the size of each and whether it is in use. Returns where they end.
    pub(crate) fn blocks(&mut self, start: u64, bits: u64, blocks: &[(u64, bool)]) -> u64 {
        let (mut at, mut before) = (start, (0, true));
        for (size, in_use) in blocks {
            if !before.1 {
                self.put(at, before.0);
            }
            self.put(at + 8, size | u64::from(before.1) | bits);
            (at, before) = (at + size, (*size, *in_use));
        }
        at
    }

    /// Links blocks into a fast bin, or into a cache if there is a key.
    pub(crate) fn list(&mut self, blocks: &[u64], key: Option<u64>) {
        for (k, block) in blocks.iter().enumerate() {
            let after = if key.is_some() { 16 } else { 0 };
            let next = blocks.get(k + 1).map_or(0, |next| next + after);
            self.put(block + 16, next ^ ((block + 16) >> 12));
            key.iter().for_each(|key| self.put(block + 24, *key));
        }
    }
}

impl Memory for Process {
    fn page_bytes(&self) -> u64 {
        PAGE
    }

    fn present(&mut self, first: u64, pages: &mut [bool]) {
        pages.iter_mut().zip(first..).for_each(|(page, number)| *page = self.pages.contains_key(&number));
    }

    fn read(&mut self, address: u64, buffer: &mut [u8]) -> bool {
        self.reads += 1;
        let mut done = 0;
        while done < buffer.len() {
            let at = address + done as u64;
            let Some(page) = self.pages.get_mut(&(at / PAGE)) else { return false };
            let bytes = &page[(at % PAGE) as usize..];
            let count = bytes.len().min(buffer.len() - done);
            buffer[done..done + count].copy_from_slice(&bytes[..count]);
            if let Some(later) = self.later.remove(&(at / PAGE)) {
                *page = later;
            }
            done += count;
        }
        true
    }
}

/// Returns the process. The main heap has 6 blocks in use (of 32 to 0x500 bytes), 2 in a cache, 1 in a fast bin, a free
/// one of 0x3000 whose second page is absent, and a top block of 0x8000 with only its first page present. The older
/// heap of the other arena has 2 blocks in use and a free one; the newer one has 1 in use and the top block. There are
/// 2 large blocks; the second follows other memory.
pub(crate) fn process() -> (Process, Space) {
    let mut process = Process::default();
    let main = [
        (0x290, true),
        (0x20, true),
        (0x30, true),
        (0x30, true),
        (0x40, true),
        (0x500, true),
        (0x3000, false),
        (0x20, true),
        (0x60, true),
        (0x810, true),
        (0x8000, true),
    ];
    let end = process.blocks(HEAP, 0, &main);
    let rest = end - 0x8000;
    process.arena(MAIN, OTHER, rest, end.next_multiple_of(PAGE) - HEAP);
    // The top block ends at a page boundary.
    let all = end.next_multiple_of(PAGE) - HEAP;
    process.put(rest + 8, (HEAP + all - rest) | 1);
    let at = |block: usize| HEAP + main[..block].iter().map(|(size, _)| size).sum::<u64>();
    process.list(&[at(2), at(3)], Some(KEY));
    process.list(&[at(7)], None);
    process.put(MAIN + 16, at(7));
    process.put(DATA + 0x1c00, KEY);
    // Two large blocks, with a limit of 65,536.
    let counts = [(40, 2 << 32), (48, 65536 | 2 << 32), (64, 0x5000), (72, 0x9000)];
    for (field, word) in [(0, 128 << 10), (8, 8), (80, HEAP), (88, 64), (96, 1032)].into_iter().chain(counts) {
        process.put(PARAMETERS + field, word);
    }
    for (heap, previous) in [(FIRST, 0), (SECOND, FIRST)] {
        for (field, word) in [(0, OTHER), (8, previous), (16, SIZE_OF_HEAPS), (24, SIZE_OF_HEAPS), (32, PAGE)] {
            process.put(heap + field, word);
        }
    }
    process.put(SECOND + 16, 0x1000);
    let start = (OTHER + SIZE).next_multiple_of(16);
    let older = FIRST + SIZE_OF_HEAPS - 0x20 - start - 0x100 - 0x40;
    process.blocks(start, 4, &[(0x100, true), (0x40, true), (older, false), (0x10, true), (0, true)]);
    let top = process.blocks(SECOND + 0x30, 4, &[(0x200, true)]);
    process.put(top + 8, (SECOND + 0x1000 - top) | 1);
    process.arena(OTHER, MAIN, top, SIZE_OF_HEAPS + 0x1000);
    process.put(LARGE + 8, 0x2000 | 2);
    process.put(LARGE + 0x2008, 1);
    process.put(LARGE + 0x5008, 0x3000 | 2);
    let space = Space {
        data: std::iter::once(DATA..DATA + 0x4000).collect(),
        heap: Some(HEAP / PAGE * PAGE..HEAP + all),
        anonymous: vec![FIRST..FIRST + SIZE_OF_HEAPS, SECOND..SECOND + 0x1000, LARGE..LARGE + 0x8000],
        threads: 2,
        has_python: false,
    };
    (process, space)
}
