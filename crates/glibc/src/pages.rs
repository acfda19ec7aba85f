//! Finds out which pages of a process are in memory, and reads only those.

use std::ops::Range;

use crate::Memory;

/// Number of pages per query.
const BLOCK: u64 = 512;
/// Maximum number of pages that are queried: 128 GiB of small ones.
const MOST_PAGES: u64 = 1 << 25;

/// Memory that is read only where its pages are present.
pub(crate) struct Pages<'m> {
    memory: &'m mut dyn Memory,
    /// Page size, bytes.
    pub(crate) page_bytes: u64,
    /// Number of the block of pages that was queried last.
    block: Option<u64>,
    present: Vec<bool>,
    /// Number of pages that may still be queried.
    left: u64,
}

impl<'m> Pages<'m> {
    pub(crate) fn new(memory: &'m mut dyn Memory) -> Self {
        // It is used as a divisor.
        let page_bytes = memory.page_bytes().max(1);
        Self { memory, page_bytes, block: None, present: vec![false; BLOCK as usize], left: MOST_PAGES }
    }

    /// Drops the cached query, so that the next access asks again.
    pub(crate) const fn forget(&mut self) {
        self.block = None;
    }

    /// Returns whether each page is in memory, from `page` to the end of its block of pages.
    fn from(&mut self, page: u64) -> &[bool] {
        let block = page / BLOCK;
        if self.block != Some(block) {
            self.present.fill(false);
            self.block = Some(block);
            if let Some(left) = self.left.checked_sub(BLOCK) {
                self.left = left;
                self.memory.present(block * BLOCK, &mut self.present);
            }
        }
        &self.present[(page % BLOCK) as usize..]
    }

    /// Returns how many bytes from an address on are in memory, at most `most`.
    pub(crate) fn run(&mut self, address: u64, most: u64) -> u64 {
        let end = address.saturating_add(most);
        let mut at = address;
        while at < end {
            let page = at / self.page_bytes;
            let there = self.from(page);
            let count = there.iter().position(|present| !present).unwrap_or(there.len()) as u64;
            let whole = count == there.len() as u64;
            if count == 0 {
                break;
            }
            at = page.saturating_add(count).saturating_mul(self.page_bytes);
            if !whole {
                break;
            }
        }
        at.min(end).saturating_sub(address)
    }

    /// Whether no further pages may be queried.
    pub(crate) const fn is_spent(&self) -> bool {
        self.left == 0
    }

    /// Returns the first address from `address` on that is in memory; `end` if there is none before it, or if no
    /// further pages may be queried.
    pub(crate) fn next_present(&mut self, address: u64, end: u64) -> u64 {
        let (size, mut at) = (self.page_bytes, address);
        while at < end && !self.is_spent() {
            let page = at / size;
            let there = self.from(page);
            let absent = there.iter().position(|present| *present);
            let next = page.saturating_add(absent.unwrap_or(there.len()) as u64).saturating_mul(size);
            at = at.max(next);
            if absent.is_some() {
                return at.min(end);
            }
        }
        end
    }

    /// Returns how many bytes of a range are in memory.
    pub(crate) fn present_bytes(&mut self, range: &Range<u64>) -> u64 {
        let (size, mut sum, mut at) = (self.page_bytes, 0, range.start);
        while at < range.end && self.left > 0 {
            let page = at / size;
            let pages = (range.end - 1) / size - page + 1;
            let there = self.from(page);
            let count = pages.min(there.len() as u64);
            let there = &there[..count as usize];
            let present = there.iter().filter(|present| **present).count() as u64;
            let [first, last] = [there[0], there[there.len() - 1]];
            sum += present * size;
            // Only parts of the first and the last page are in the range.
            sum -= if first { at - page * size } else { 0 };
            let end = (page + count).saturating_mul(size);
            sum -= if last { end.saturating_sub(range.end) } else { 0 };
            at = end;
        }
        sum
    }

    /// Returns how many bytes are in memory in the pages that a range touches.
    pub(crate) fn resident_bytes(&mut self, range: &Range<u64>) -> u64 {
        let start = range.start / self.page_bytes * self.page_bytes;
        let end = range.end.checked_next_multiple_of(self.page_bytes).unwrap_or(range.end);
        self.present_bytes(&(start..end))
    }

    /// Fills a buffer if all of it is in memory and can be read.
    pub(crate) fn read(&mut self, address: u64, buffer: &mut [u8]) -> bool {
        let length = buffer.len() as u64;
        self.run(address, length) == length && self.memory.read(address, buffer)
    }

    /// Fills a buffer from memory, or from the file that is mapped there.
    pub(crate) fn fetch(&mut self, address: u64, buffer: &mut [u8]) -> bool {
        self.read(address, buffer) || self.memory.read_mapped_file(address, buffer)
    }

    /// Reads words from memory, or from the file that is mapped there.
    pub(crate) fn fetched_words<const N: usize>(&mut self, address: u64) -> Option<[u64; N]> {
        let mut words = [[0; 8]; N];
        self.fetch(address, words.as_flattened_mut()).then(|| words.map(u64::from_le_bytes))
    }

    /// Reads words from memory.
    pub(crate) fn words<const N: usize>(&mut self, address: u64) -> Option<[u64; N]> {
        let mut words = [[0; 8]; N];
        self.read(address, words.as_flattened_mut()).then(|| words.map(u64::from_le_bytes))
    }
}

/// Returns the word at an offset; 0 past the end.
#[inline]
pub(crate) fn word(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |word| u64::from_le_bytes(*word))
}
