//! Which pages of a process are in memory, by its page map, which faults nothing in.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

/// Bytes of an entry of `/proc/PID/pagemap`, and the bit that says that the page is in memory.
const ENTRY: usize = 8;
const PRESENT: u64 = 1 << 63;
/// Entries that are read at once.
const MOST: usize = 512;

/// The page map of a process.
pub struct Pages {
    map: File,
    /// Size of a page.
    pub page_bytes: u64,
}

impl Pages {
    /// That of a process; `None` if it may not be read.
    pub fn of(pid: u32) -> Option<Self> {
        let map = File::open(format!("/proc/{pid}/pagemap")).ok()?;
        Some(Self { map, page_bytes: procfs::page_size() })
    }

    /// Says of each page from number `first` on whether it is in memory. Returns whether the map could be read.
    pub fn present(&self, first: u64, pages: &mut [bool]) -> bool {
        let mut entries = [0; ENTRY * MOST];
        for (pages, first) in pages.chunks_mut(MOST).zip((first..).step_by(MOST)) {
            let entries = &mut entries[..pages.len() * ENTRY];
            let Some(at) = first.checked_mul(ENTRY as u64) else { return false };
            if self.map.read_exact_at(entries, at).is_err() {
                return false;
            }
            let (entries, _) = entries.as_chunks();
            for (page, entry) in pages.iter_mut().zip(entries) {
                *page = u64::from_ne_bytes(*entry) & PRESENT != 0;
            }
        }
        true
    }

    /// How much of a range is in memory, bytes; `None` if that cannot be read. The range begins and ends with pages.
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
