//! `/proc/PID/maps`: what is mapped, and where more could be mapped. Pure.

use std::io::{self, Read};
use std::ops::Range;

/// Most bytes that are read of a maps file: half a million mappings, eight times what Linux allows by default.
const MAX_BYTES: u64 = 64 << 20;
/// Largest distance between the far ends of a new mapping and its neighbour: a 32-bit displacement, less some slack.
const REACH: u64 = 0x7ff0_0000;
/// Free space that is kept on both sides.
const MARGIN: u64 = 0x1_0000;
/// Nothing is mapped below this address.
const LOWEST: u64 = 0x1_0000;
/// Nothing is mapped at or above this address unless a program asks for it, however many page table levels there are.
const HIGHEST: u64 = 0x7fff_ffff_f000;
/// Size of a page, bytes.
pub const PAGE_BYTES: u64 = 4096;

/// One mapping of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mapping {
    /// Its addresses.
    pub range: Range<u64>,
    /// It may be read.
    pub is_readable: bool,
    /// It may be written.
    pub is_writable: bool,
    /// It may be run.
    pub is_executable: bool,
    /// Writes are seen by others.
    pub is_shared: bool,
    /// Offset in the file, bytes.
    pub offset: u64,
    /// Device of the file as text (`fe:00`).
    pub device: String,
    /// Inode of the file; 0 if there is none.
    pub inode: u64,
    /// Path, or the kernel's name for it (`[heap]`), or empty.
    pub name: String,
}

impl Mapping {
    /// Reads a line of a maps file.
    #[must_use]
    pub fn parse(line: &str) -> Option<Self> {
        let mut fields = line.splitn(6, ' ');
        let (start, end) = fields.next()?.split_once('-')?;
        let range = u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?;
        let permissions = fields.next()?.as_bytes();
        let allows = |at: usize, letter| permissions.get(at) == Some(&letter);
        let offset = u64::from_str_radix(fields.next()?, 16).ok()?;
        let device = fields.next()?.to_owned();
        let inode = fields.next()?.parse().ok()?;
        let name = fields.next().unwrap_or_default().trim_start().to_owned();
        (range.start < range.end).then(|| Self {
            is_readable: allows(0, b'r'),
            is_writable: allows(1, b'w'),
            is_executable: allows(2, b'x'),
            is_shared: allows(3, b's'),
            range,
            offset,
            device,
            inode,
            name,
        })
    }

    /// Whether it contains all of `range`.
    #[must_use]
    pub fn covers(&self, range: &Range<u64>) -> bool {
        self.range.start <= range.start && range.end <= self.range.end
    }

    /// Whether it is a file's code, which only a debugger or a probe writes into.
    #[must_use]
    pub fn is_text(&self) -> bool {
        self.is_executable && !self.is_writable && !self.is_shared && self.inode != 0
    }

    /// Whether memory that was never written there is zero, rather than a file's content.
    pub(crate) fn is_anonymous(&self) -> bool {
        self.inode == 0
    }

    /// Length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }
}

/// All mappings of a process, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Maps {
    mappings: Vec<Mapping>,
    /// Where the heap begins, or would (brk); 0 if unknown.
    heap: u64,
}

impl Maps {
    /// Reads a maps file. `heap` is where the heap begins, 0 if unknown.
    ///
    /// # Errors
    /// The file cannot be read, or is longer than any that Linux makes with sensible settings.
    pub fn read(file: impl Read, heap: u64) -> io::Result<Self> {
        let mut bytes = Vec::new();
        if file.take(MAX_BYTES).read_to_end(&mut bytes)? as u64 == MAX_BYTES {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "too many mappings"));
        }
        Ok(Self::parse(&String::from_utf8_lossy(&bytes), heap))
    }

    /// Reads the text of a maps file. Malformed lines are skipped.
    #[must_use]
    pub fn parse(text: &str, heap: u64) -> Self {
        let mut mappings: Vec<Mapping> = text.lines().filter_map(Mapping::parse).collect();
        mappings.sort_by_key(|mapping| mapping.range.start);
        Self { mappings, heap }
    }

    /// The mappings, ascending.
    #[must_use]
    pub fn as_slice(&self) -> &[Mapping] {
        &self.mappings
    }

    /// The mapping that contains an address.
    #[must_use]
    pub fn at(&self, address: u64) -> Option<&Mapping> {
        let at = self.mappings.partition_point(|mapping| mapping.range.end <= address);
        self.mappings.get(at).filter(|mapping| mapping.range.start <= address)
    }

    /// The mappings that begin in a range, ascending.
    #[must_use]
    pub fn within(&self, range: &Range<u64>) -> &[Mapping] {
        let place = |address| self.mappings.partition_point(|mapping| mapping.range.start < address);
        &self.mappings[place(range.start)..place(range.end)]
    }

    /// Finds a free place for `bytes` bytes from which every address of `near` can be reached by a 32-bit displacement,
    /// and vice versa. It is as near as possible while keeping clear of the heap and the stack, which grow.
    #[must_use]
    pub fn gap(&self, near: &Range<u64>, bytes: u64) -> Option<u64> {
        let bytes = bytes.checked_next_multiple_of(PAGE_BYTES)?;
        let user = || self.mappings.iter().filter(|mapping| mapping.range.end <= HIGHEST);
        let above = user().map(Some).chain([None]);
        let below = [None].into_iter().chain(user().map(Some));
        below
            .zip(above)
            .flat_map(|(below, above)| self.places(below, above, bytes))
            .flatten()
            .filter_map(|(start, is_doubtful)| {
                let end = start + bytes;
                let distance = end.max(near.end) - start.min(near.start);
                (distance <= REACH).then_some((is_doubtful, distance, start))
            })
            .min()
            .map(|(.., start)| start)
    }

    /// The lowest and the highest place between two neighbours, and whether the heap or the stack may grow into it.
    fn places(&self, below: Option<&Mapping>, above: Option<&Mapping>, bytes: u64) -> [Option<(u64, bool)>; 2] {
        let gap = below.map_or(LOWEST, |below| below.range.end)..above.map_or(HIGHEST, |above| above.range.start);
        let lowest = gap.start + MARGIN;
        let Some(highest) = gap.end.checked_sub(MARGIN + bytes).filter(|highest| *highest >= lowest) else {
            return [None, None];
        };
        let is_heap = below.is_some_and(|below| below.name == "[heap]")
            || (self.heap != 0 && (gap.start..gap.end).contains(&self.heap));
        let is_stack = above.is_some_and(|above| above.name.starts_with("[stack"));
        [(!is_heap).then_some((lowest, is_stack)), (!is_stack).then_some((highest & !(PAGE_BYTES - 1), is_heap))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
00400000-00401000 r-xp 00000000 fe:00 77                                 /bin/a b
10000000-10021000 rw-p 00000000 00:00 0                                  [heap]
7f0000000000-7f0000200000 r-xp 00028000 fe:00 12                         /lib/libc.so.6
7f0000400000-7f0000401000 rw-s 00000000 00:01 5                          /memfd:x (deleted)
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
";

    #[test]
    fn lines_are_read_and_senseless_ones_left_out() {
        let maps = Maps::parse(&format!("x\n{TEXT}2-1 r-xp 0 0:0 0\n1-2 r-xp 0 0:0\n"), 0);
        assert_eq!(maps.as_slice().len(), 6);
        let program = maps.at(0x400fff).expect("it is mapped");
        assert_eq!((program.name.as_str(), program.inode, program.device.as_str()), ("/bin/a b", 77, "fe:00"));
        assert!(program.is_executable && !program.is_writable && !program.is_shared && program.is_readable);
        assert!(maps.at(0x7f00_0040_0000).is_some_and(|mapping| mapping.is_shared && mapping.is_writable));
        assert_eq!(maps.at(0x401000), None);
        assert_eq!(maps.at(0x7f00_0000_0000).map(|libc| libc.offset), Some(0x28000));
        assert!(maps.at(0x7f00_0000_0000).is_some_and(|libc| libc.covers(&(0x7f00_0000_1000..0x7f00_0020_0000))));
        assert!(maps.at(0x7f00_0000_0000).is_some_and(|libc| !libc.covers(&(0x7f00_0000_1000..0x7f00_0020_0001))));
    }

    /// Checks that the gap is free, in reach and aligned to a page, and returns it.
    fn check(maps: &Maps, near: &Range<u64>, bytes: u64) -> u64 {
        let start = maps.gap(near, bytes).expect("there is a gap");
        let end = start + bytes;
        assert!(maps.as_slice().iter().all(|mapping| mapping.range.end <= start || mapping.range.start >= end));
        assert!(end.abs_diff(near.start) < 1 << 31 && start.abs_diff(near.end) < 1 << 31, "{start:#x}");
        assert_eq!(start % PAGE_BYTES, 0);
        start
    }

    #[test]
    fn a_gap_is_free_and_in_reach() {
        let maps = Maps::parse(TEXT, 0x10000000);
        let libc = 0x7f00_0000_0000..0x7f00_0020_0000;
        // Above the library: the heap grows below it.
        assert_eq!(check(&maps, &libc, 0x10000), 0x7f00_0021_0000);
        // Too long for the gap between the library and the memfd: beyond, on either side.
        check(&maps, &libc, 0x300000);
        assert_eq!(maps.gap(&libc, 1 << 31), None, "out of reach");
        assert_eq!(maps.gap(&(0x2000_0000_0000..0x2000_0000_1000), 1 << 31), None);
        // There is space below and above the heap, but the heap grows upwards.
        let program = check(&maps, &(0x400000..0x401000), 0x4000);
        assert!(program < 0x10000000, "{program:#x}");
    }

    #[test]
    fn the_heap_keeps_its_place_even_before_it_is_there() {
        let maps = Maps::parse("5555_0000\n555500000000-555500100000 r-xp 0 fe:00 1 /bin/a\n", 0x5555_0010_2000);
        assert!(check(&maps, &(0x5555_0000_0000..0x5555_0010_0000), 0x10000) < 0x5555_0000_0000);
    }

    #[test]
    fn stacks_are_not_hemmed_in() {
        let maps = Maps::parse(TEXT, 0);
        let near = 0x7ffc_0000_0000..0x7ffc_0002_1000;
        assert!(check(&maps, &near, 0x10000) > near.start);
    }

    #[test]
    fn too_long_a_file_is_an_error() {
        assert!(Maps::read(io::repeat(b'\n'), 0).is_err());
        assert_eq!(Maps::read(TEXT.as_bytes(), 0).map(|maps| maps.as_slice().len()).ok(), Some(6));
    }
}
