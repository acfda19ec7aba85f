//! Where the code is in a file.
//!
//! The kernel first maps a whole program with the permissions of its first segment, and then maps the other segments
//! over that. The loader does the same with libraries. If the first segment is executable (gold's default, `ld -z
//! noseparate-code`), the event for its mapping also covers data and unused addresses. No event reports what replaces
//! them, because the replacements are not executable.

use std::hash::{DefaultHasher, Hasher as _};
use std::ops::Range;

use heapbpf_elf::{Elf, Image, Segment};

/// Maximum number of ranges to keep for a file. With more, everything that is mapped counts as code. Real files have
/// one or two.
const MAX_RANGES: usize = 16;
/// A checksum reads this many pages of each range, and the first one of the file.
const PAGES: u64 = 16;
const PAGE_BYTES: u64 = 4096;

/// File offsets, in whole pages, that are mapped for execution. Segments that are neighbours both in the file and in
/// memory form one range, because they form one mapping.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CodeRanges(Box<[Range<u64>]>);

impl CodeRanges {
    /// Reads the ranges of an ELF file. Empty if its headers cannot be read. `page_bytes` is the page size, a power of
    /// two.
    #[must_use]
    pub fn read(image: &dyn Image, page_bytes: u64) -> Self {
        Elf::read(image).map_or_else(|_| Self::default(), |elf| Self::of(&elf.segments, page_bytes))
    }

    fn of(segments: &[Segment], page_bytes: u64) -> Self {
        let mut code: Vec<&Segment> = segments.iter().filter(|segment| segment.is_executable()).collect();
        code.sort_by_key(|segment| segment.offset);
        // Each with the distance between its addresses and its file offsets.
        let mut ranges: Vec<(Range<u64>, u64)> = Vec::new();
        for segment in code {
            let end = segment.offset.saturating_add(segment.file_bytes);
            let end = end.checked_next_multiple_of(page_bytes).unwrap_or(u64::MAX);
            let start = segment.offset - segment.offset % page_bytes;
            let distance = segment.address.wrapping_sub(segment.offset);
            if let Some((last, same)) = ranges.last_mut()
                && *same == distance
                && start <= last.end
            {
                last.end = last.end.max(end);
            } else if ranges.len() < MAX_RANGES {
                ranges.push((start..end, distance));
            } else {
                return Self::default();
            }
        }
        Self(ranges.into_iter().map(|(range, _)| range).collect())
    }

    /// How many of the `bytes` mapped from `file_offset` on are code. Returns `bytes` if they do not begin with code,
    /// because then the file is not mapped as its headers say.
    #[must_use]
    pub fn mapped_bytes(&self, file_offset: u64, bytes: u64) -> u64 {
        let here = self.0.iter().filter(|range| range.contains(&file_offset));
        here.map(|range| range.end - file_offset).max().map_or(bytes, |code_bytes| code_bytes.min(bytes))
    }

    /// A checksum of the file's first page and of pages spread over its code: of all of it if it is small. `None` if
    /// they cannot be read.
    #[must_use]
    pub fn checksum(&self, image: &dyn Image) -> Option<u64> {
        let file_bytes = image.length_bytes().ok()?;
        let (mut checksum, mut page) = (DefaultHasher::new(), [0; PAGE_BYTES as usize]);
        for Range { start, end } in std::iter::once(&(0..PAGE_BYTES)).chain(&self.0) {
            let end = (*end).min(file_bytes);
            let distance = (end.saturating_sub(*start) / PAGES).max(PAGE_BYTES);
            for at in (*start..end).step_by(distance as usize) {
                let page = &mut page[..(end - at).min(PAGE_BYTES) as usize];
                image.read_at(at, page).ok()?;
                checksum.write(page);
            }
        }
        Some(checksum.finish())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::modules::ModuleTable;
    use crate::processes::Processes;
    use crate::record::{Device, HostEvent, MapEvent};

    const PAGE: u64 = 0x1000;
    const READ: u32 = 4;
    const CODE: u32 = 5;
    const DATA: u32 = 6;

    /// An ELF file that consists of headers, with one loadable segment for each (flags, offset, address, bytes in the
    /// file).
    fn file(segments: &[(u32, u64, u64, u64)]) -> Vec<u8> {
        let mut file = vec![0; 64];
        file[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        let mut half = |at: usize, value: u16| file[at..at + 2].copy_from_slice(&value.to_le_bytes());
        // Kind, version, sizes of the headers, number of program headers, which begin at byte 64.
        for (at, value) in [(16, 3), (20, 1), (32, 64), (52, 64), (54, 56), (56, segments.len() as u16)] {
            half(at, value);
        }
        for (flags, offset, address, bytes) in segments {
            file.extend([1_u32, *flags].map(u32::to_le_bytes).as_flattened());
            file.extend([*offset, *address, *address, *bytes, *bytes, PAGE].map(u64::to_le_bytes).as_flattened());
        }
        file
    }

    fn ranges(segments: &[(u32, u64, u64, u64)]) -> CodeRanges {
        CodeRanges::read(&file(segments), PAGE)
    }

    #[test]
    fn a_mapping_of_the_whole_file_ends_with_its_first_segment() {
        let code = ranges(&[(CODE, 0, 0, 0x18e0), (DATA, 0x1dc0, 0x2dc0, 0x2e0)]);
        assert_eq!(code.mapped_bytes(0, 0xc8000), 0x2000);
        assert_eq!(code.mapped_bytes(0x1000, 0xc7000), 0x1000, "what another mapping left of it");
        assert_eq!(code.mapped_bytes(0, 0x1000), 0x1000, "no longer than it is");
        // Data that was made executable.
        assert_eq!(code.mapped_bytes(0x2000, 0x9000), 0x9000);
    }

    /// No event reports that data and unused memory replaced the rest of the mapping.
    #[test]
    fn what_an_event_says_of_a_whole_file_counts_for_its_code_alone() {
        let mut program = tempfile::NamedTempFile::new().expect("a file");
        let bytes = file(&[(CODE, 0, 0, 0x18e0), (DATA, 0x1dc0, 0x2dc0, 0x2e0)]);
        std::io::Write::write_all(&mut program, &bytes).expect("our own file");
        let metadata = program.as_file().metadata().expect("our own file");
        let device = Device { major: libc::major(metadata.dev()), minor: libc::minor(metadata.dev()) };
        let (mut processes, mut modules) = (Processes::default(), ModuleTable::new(8));
        // No process has this PID: the file is found by its path.
        let pid = 5_000_000;
        let mut seen = |inode, path: &[u8]| {
            let map =
                MapEvent { time_ns: 10, pid, tid: pid, address: 0x50_0000, length: 0xc_8000, ..MapEvent::default() };
            let map = MapEvent { device, inode, path: path.into(), ..map };
            processes.apply(&HostEvent::Map(map), 0, &mut modules);
            let known = processes.current(pid).expect("begun by its mapping");
            [0x50_0000, 0x50_1fff, 0x50_2000, 0x5c_0000].map(|address| known.space.resolve(address, 10).is_some())
        };
        assert_eq!(seen(metadata.ino(), program.path().as_os_str().as_bytes()), [true, true, false, false]);
        assert_eq!(seen(0, b"//anon"), [true; 4], "code that a program makes has no headers");
    }

    #[test]
    fn segments_with_code_that_are_mapped_as_one_stay_whole() {
        let code = ranges(&[(CODE, 0, 0, 0x1800), (CODE, 0x1800, 0x1800, 0x1800), (DATA, 0x3000, 0x3000, 0x10)]);
        assert_eq!(code.mapped_bytes(0, 0x9000), 0x3000);
        // With different addresses, the second is mapped separately. The page that both share belongs to either.
        let code = ranges(&[(READ, 0, 0, 0x100), (CODE, 0, 0, 0x1800), (CODE, 0x1800, 0x8800, 0x1800)]);
        assert_eq!([0, 0x1000, 0x2000].map(|at| code.mapped_bytes(at, 0x9000)), [0x2000, 0x2000, 0x1000]);
    }

    #[test]
    fn hostile_headers_are_harmless() {
        let all = |code: &CodeRanges| assert_eq!(code.mapped_bytes(0, 0x9000), 0x9000);
        all(&CodeRanges::read(&b"\x7fELF".to_vec(), PAGE));
        all(&ranges(&[]));
        all(&ranges(&[(CODE, 0, 0, u64::MAX)]));
        let (page, last) = (u64::MAX - 0xfff, ranges(&[(CODE, u64::MAX, 1, u64::MAX), (CODE, 0x5000, 0, 0)]));
        assert_eq!(last.mapped_bytes(page, 0x9000), 0xfff);
        all(&last);
        let many: Vec<_> = (0..MAX_RANGES as u64 + 1).map(|at| (CODE, 2 * at * PAGE, at, 1)).collect();
        all(&ranges(&many));
        assert_eq!(ranges(&many[1..]).mapped_bytes(2 * PAGE, 0x9000), PAGE);
    }
}
