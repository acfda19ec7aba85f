//! How much of each block is in memory, and how much is swapped out. Nothing is faulted in, and the process is not
//! stopped.
//!
//! Linux 6.7 and later (`PAGEMAP_SCAN`, Documentation/admin-guide/mm/pagemap.rst) list the pages of a range that are
//! present, leave out the zero page, and skip ranges without page tables. On older kernels the page map is read, where
//! the zero page looks like any other.

use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::time::Duration;

use super::clock::thread_cpu_time;
use super::pages::{ENTRY, MOST, PRESENT as ENTRY_PRESENT, Pages};

/// Blocks at most this far apart are examined together, in bytes. Examining the gap takes less time than another call.
const NEAR: u64 = 256 << 10;
/// Maximum number of pages that one call finds, because the kernel holds the lock of the process's mappings while it
/// scans. Ranges without page tables take no time.
const MOST_PAGES: u64 = 65_536;

/// Bits of `struct page_region::categories` and of masks (include/uapi/linux/fs.h).
const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;
const ZERO_PAGE: u64 = 1 << 5;
/// The bit in a page map entry that says that the page is swapped out.
const ENTRY_SWAPPED: u64 = 1 << 62;

/// Where a block's bytes are. The rest was never written to, or was given back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartsOfBlock {
    /// In memory.
    pub resident_bytes: u64,
    /// Swapped out.
    pub swapped_bytes: u64,
}

/// Finds out where the blocks of a process are, in the order given. `None` if that may not be read, or takes more CPU
/// time than `longest`.
pub fn of(pid: u32, blocks: &[Range<u64>], longest: Duration) -> Option<Vec<PartsOfBlock>> {
    let pages = Pages::of(pid)?;
    let until = thread_cpu_time() + longest;
    let mut found = vec![PartsOfBlock::default(); blocks.len()];
    let mut order: Vec<usize> = (0..blocks.len()).filter(|&number| !blocks[number].is_empty()).collect();
    order.sort_unstable_by_key(|&number| blocks[number].start);
    let page = pages.page_bytes;
    let (mut regions, mut rest) = (Vec::new(), order.as_slice());
    while let Some(&first) = rest.first() {
        let mut whole = blocks[first].clone();
        let near = rest.iter().take_while(|&&number| {
            let is_near = blocks[number].start <= whole.end.saturating_add(NEAR);
            whole.end = if is_near { whole.end.max(blocks[number].end) } else { whole.end };
            is_near
        });
        let (together, later) = rest.split_at(near.count());
        let mut at = whole.start / page * page;
        let end = whole.end.checked_next_multiple_of(page)?;
        regions.clear();
        while at < end {
            at = list(&pages, at..end, &mut regions)?;
            (thread_cpu_time() <= until).then_some(())?;
        }
        together.iter().for_each(|&number| found[number] = within(&blocks[number], &regions));
        rest = later;
    }
    Some(found)
}

/// Neighbouring pages in the same state.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Region {
    range: Range<u64>,
    is_swapped: bool,
}

/// How much of a block lies in `regions`, which are in order.
fn within(block: &Range<u64>, regions: &[Region]) -> PartsOfBlock {
    let mut found = PartsOfBlock::default();
    let first = regions.partition_point(|region| region.range.end <= block.start);
    for Region { range, is_swapped } in regions[first..].iter().take_while(|region| region.range.start < block.end) {
        let bytes = range.end.min(block.end) - range.start.max(block.start);
        *if *is_swapped { &mut found.swapped_bytes } else { &mut found.resident_bytes } += bytes;
    }
    found
}

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Default)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::Ioctl = libc::_IOWR::<Scan>(b'f' as u32, 16);

/// Lists the pages of a range that are in memory or swapped out, and returns how far it got. It stops before the end if
/// there are many regions.
fn list(pages: &Pages, range: Range<u64>, regions: &mut Vec<Region>) -> Option<u64> {
    let mut list = [PageRegion::default(); MOST];
    let mut scan = Scan {
        size: size_of::<Scan>() as u64,
        start: range.start,
        end: range.end,
        vec: list.as_mut_ptr() as u64,
        vec_len: MOST as u64,
        max_pages: MOST_PAGES,
        // Excludes the zero page.
        category_inverted: ZERO_PAGE,
        category_mask: ZERO_PAGE,
        category_anyof_mask: PRESENT | SWAPPED,
        return_mask: PRESENT | SWAPPED,
        ..Scan::default()
    };
    // SAFETY: the argument is the structure that this call takes, and `vec` has `vec_len` entries to write to.
    let count = unsafe { libc::ioctl(pages.map.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) };
    let Ok(count) = usize::try_from(count) else {
        let is_unknown = std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOTTY);
        return if is_unknown { list_entries(pages, range, regions) } else { None };
    };
    let region = |it: &PageRegion| Region { range: it.start..it.end, is_swapped: it.categories & SWAPPED != 0 };
    regions.extend(list[..count.min(MOST)].iter().map(region));
    (scan.walk_end > range.start).then_some(scan.walk_end)
}

/// Does the same by reading the page map, for kernels without the call.
fn list_entries(pages: &Pages, range: Range<u64>, regions: &mut Vec<Region>) -> Option<u64> {
    let page = pages.page_bytes;
    let count = ((range.end - range.start) / page).min(MOST as u64);
    let mut buffer = [0; ENTRY * MOST];
    let entries = pages.entries(range.start / page, count as usize, &mut buffer)?;
    for (entry, start) in entries.zip((range.start..).step_by(page as usize)) {
        let is_swapped = entry & ENTRY_SWAPPED != 0;
        if entry & (ENTRY_PRESENT | ENTRY_SWAPPED) == 0 {
            continue;
        }
        match regions.last_mut().filter(|last| last.range.end == start && last.is_swapped == is_swapped) {
            Some(last) => last.range.end += page,
            None => regions.push(Region { range: start..start + page, is_swapped }),
        }
    }
    Some(range.start + count * page)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(10);

    /// Maps this many pages and writes to those for which `written` returns true.
    fn mapped(pages: usize, written: impl Fn(usize) -> bool) -> Range<u64> {
        let page = procfs::page_size() as usize;
        let (access, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
        // SAFETY: a new private mapping, which stays mapped; only this function writes to it.
        unsafe {
            let start = libc::mmap(std::ptr::null_mut(), pages * page, access, flags, -1, 0);
            assert!(start != libc::MAP_FAILED && libc::madvise(start, pages * page, libc::MADV_NOHUGEPAGE) == 0);
            let start = start.cast::<u8>();
            (0..pages.min(1 << 20))
                .filter(|&number| written(number))
                .for_each(|number| start.add(number * page).write(1));
            start as u64..start as u64 + (pages * page) as u64
        }
    }

    fn both(blocks: &[Range<u64>]) -> [Vec<PartsOfBlock>; 2] {
        let map = Pages::of(std::process::id()).expect("our own page map");
        let page = procfs::page_size();
        let by_entries = blocks.iter().map(|block| {
            let (mut regions, mut at) = (Vec::new(), block.start / page * page);
            while at < block.end {
                let end = block.end.next_multiple_of(page);
                at = list_entries(&map, at..end, &mut regions).expect("our own pages");
            }
            within(block, &regions)
        });
        [of(std::process::id(), blocks, LONG).expect("our own pages"), by_entries.collect()]
    }

    #[test]
    fn pages_that_were_written_to_are_in_memory() {
        let page = procfs::page_size();
        let third = mapped(3000, |number| number % 3 == 0);
        let none = mapped(10, |_| false);
        // Blocks within pages, across their borders, out of order, one inside another.
        let at = |from: u64, to: u64| third.start + from..third.start + to;
        let blocks = [third.clone(), none, at(page - 10, page + 10), at(100, 200), at(page, 3 * page), at(5, 5)];
        let resident = [1000 * page, 0, 10, 100, 0, 0];
        for found in both(&blocks) {
            assert_eq!(found.iter().map(|it| it.resident_bytes).collect::<Vec<_>>(), resident);
            assert!(found.iter().all(|it| it.swapped_bytes == 0));
        }
    }

    /// A terabyte of address space has no page tables to scan. It is not read either.
    #[test]
    fn reserved_memory_takes_no_time() {
        let page = procfs::page_size() as usize;
        let Some(found) = of(std::process::id(), &[mapped((1 << 40) / page, |number| number == 7)], LONG) else {
            return heapbpf_testing::skipped("this kernel has no PAGEMAP_SCAN, and a terabyte takes too long without");
        };
        assert_eq!(found[0].resident_bytes, page as u64);
    }

    #[test]
    fn the_zero_page_is_not_in_memory() {
        let range = mapped(8, |number| number == 0);
        // SAFETY: the pages of the mapping are readable, and nothing writes to them.
        let sum: u32 = (0..8).map(|number| unsafe { *((range.start + number * 4096) as *const u8) } as u32).sum();
        let found = of(std::process::id(), &[range], LONG).expect("our own pages")[0].resident_bytes;
        assert!(sum == 1 && (found == procfs::page_size() || found == 8 * procfs::page_size()), "{found}");
    }

    #[test]
    fn who_may_not_be_read_is_unknown() {
        let many = [mapped(100, |_| true)];
        assert_eq!(of(u32::MAX, &many, LONG), None);
        assert_eq!(of(std::process::id(), &many, Duration::ZERO), None, "no time");
    }
}
