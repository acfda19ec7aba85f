//! Finds out which pages of a process are in memory, from its page map. Faults nothing in.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

/// Bytes of an entry of `/proc/PID/pagemap`, and the bit that says that the page is in memory.
pub(crate) const ENTRY: usize = 8;
pub(crate) const PRESENT: u64 = 1 << 63;
/// Maximum number of entries to read at once.
pub(crate) const MOST: usize = 512;

/// The page map of a process.
pub struct Pages {
    pub(crate) map: File,
    /// Size of a page.
    pub page_bytes: u64,
}

impl Pages {
    /// Opens the page map of a process. `None` if it may not be read.
    pub fn of(pid: u32) -> Option<Self> {
        let map = File::open(format!("/proc/{pid}/pagemap")).ok()?;
        Some(Self { map, page_bytes: procfs::page_size() })
    }

    /// Sets for each page, from page number `first` on, whether it is in memory. Returns whether the map could be read.
    pub fn present(&self, first: u64, pages: &mut [bool]) -> bool {
        let mut buffer = [0; ENTRY * MOST];
        pages.chunks_mut(MOST).zip((first..).step_by(MOST)).all(|(pages, first)| {
            let entries = self.entries(first, pages.len(), &mut buffer);
            entries.is_some_and(|entries| {
                pages.iter_mut().zip(entries).for_each(|(page, entry)| *page = entry & PRESENT != 0);
                true
            })
        })
    }

    /// Reads the entries of `count` pages from page number `first` on. `count` is at most [`MOST`]. `None` if they
    /// cannot be read.
    pub(crate) fn entries<'b>(
        &self,
        first: u64,
        count: usize,
        buffer: &'b mut [u8; ENTRY * MOST],
    ) -> Option<impl Iterator<Item = u64> + 'b> {
        let entries = &mut buffer[..count * ENTRY];
        self.map.read_exact_at(entries, first.checked_mul(ENTRY as u64)?).ok()?;
        let (entries, _) = entries.as_chunks();
        Some(entries.iter().map(|entry| u64::from_ne_bytes(*entry)))
    }

    /// How many bytes of a range are in memory. `None` if that cannot be read. The range begins and ends on page
    /// boundaries.
    pub fn present_bytes(&self, range: &Range<u64>) -> Option<u64> {
        let (mut page, end) = (range.start / self.page_bytes, range.end / self.page_bytes);
        let (mut present, mut sum) = ([false; MOST], 0);
        while page < end {
            let pages = &mut present[..(end - page).min(MOST as u64) as usize];
            self.present(page, pages).then_some(())?;
            sum += pages.iter().filter(|present| **present).count() as u64 * self.page_bytes;
            page += pages.len() as u64;
        }
        Some(sum)
    }
}
