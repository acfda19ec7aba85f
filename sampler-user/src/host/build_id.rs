//! GNU build IDs, read from ELF notes with a bound on what is read: the file may be hostile.

use std::fs::File;

use object::Endianness;
use object::elf::{self, FileHeader32, FileHeader64};
use object::read::elf::{FileHeader, ProgramHeader};
use object::read::{ReadCache, ReadRef};

/// Longest build ID that is taken for one (SHA-1 has 20 bytes, SHA-256 32).
const MAX_BUILD_ID_BYTES: usize = 64;
/// Most bytes read at once; notes and program headers of real files are far smaller.
const MAX_READ_BYTES: u64 = 64 << 10;
/// Most note segments that are looked into.
const MAX_NOTE_SEGMENTS: usize = 16;

/// Whether `file` begins like an ELF file.
#[must_use]
pub fn is_elf(file: &File) -> bool {
    let mut magic = [0; 4];
    std::os::unix::fs::FileExt::read_exact_at(file, &mut magic, 0).is_ok() && magic == elf::ELFMAG
}

/// The build ID of an ELF file; `None` if it has none that is well-formed.
#[must_use]
pub fn of_file(file: &File) -> Option<Box<[u8]>> {
    let cache = ReadCache::new(file);
    of_data(Bounded(&cache))
}

/// The build ID of an ELF image in memory.
#[must_use]
pub fn of_bytes(bytes: &[u8]) -> Option<Box<[u8]>> {
    of_data(Bounded(bytes))
}

fn of_data<'data, R: ReadRef<'data>>(data: R) -> Option<Box<[u8]>> {
    match elf::FileClass(*data.read_bytes_at(0, 5).ok()?.get(4)?) {
        elf::ELFCLASS32 => of_class::<FileHeader32<Endianness>, R>(data),
        elf::ELFCLASS64 => of_class::<FileHeader64<Endianness>, R>(data),
        _ => None,
    }
}

fn of_class<'data, H: FileHeader<Endian = Endianness>, R: ReadRef<'data>>(data: R) -> Option<Box<[u8]>> {
    let header = H::parse(data).ok()?;
    let endian = header.endian().ok()?;
    let segments = header.program_headers(endian, data).ok()?.iter();
    for segment in segments.filter(|segment| segment.p_type(endian) == elf::PT_NOTE).take(MAX_NOTE_SEGMENTS) {
        let Ok(Some(mut notes)) = segment.notes(endian, data) else { continue };
        while let Ok(Some(note)) = notes.next() {
            if note.n_type(endian) == elf::NT_GNU_BUILD_ID && note.name() == elf::ELF_NOTE_GNU {
                let id = note.desc();
                return (1..=MAX_BUILD_ID_BYTES).contains(&id.len()).then(|| id.into());
            }
        }
    }
    None
}

/// Refuses large reads, whatever the headers claim.
#[derive(Clone, Copy)]
struct Bounded<R>(R);

impl<'data, R: ReadRef<'data>> ReadRef<'data> for Bounded<R> {
    fn len(self) -> Result<u64, ()> {
        self.0.len()
    }

    fn read_bytes_at(self, offset: u64, size: u64) -> Result<&'data [u8], ()> {
        if size > MAX_READ_BYTES { Err(()) } else { self.0.read_bytes_at(offset, size) }
    }

    fn read_bytes_at_until(self, range: std::ops::Range<u64>, delimiter: u8) -> Result<&'data [u8], ()> {
        let end = range.end.min(range.start.saturating_add(MAX_READ_BYTES));
        self.0.read_bytes_at_until(range.start..end, delimiter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::skipped;

    #[test]
    fn a_library_of_this_machine_from_file_and_memory() {
        let map = crate::host::proc_maps::read(std::process::id()).expect("our maps");
        let libc = map.iter().find(|map| map.path.windows(6).any(|part| part == b"libc.s"));
        let Some(libc) = libc else {
            skipped("no shared libc in this process");
            return;
        };
        let path = String::from_utf8_lossy(&libc.path).into_owned();
        let file = File::open(&path).expect("libc opens");
        assert!(is_elf(&file));
        let from_file = of_file(&file).expect("distribution libraries have a build ID");
        let from_memory = of_bytes(&std::fs::read(&path).expect("libc reads")).expect("the same from memory");
        assert_eq!((from_file.len(), &from_file), (20, &from_memory));
    }

    /// Every field damaged in turn, and truncations: no panic, nothing long.
    #[test]
    fn damaged_files_are_harmless() {
        let whole = std::fs::read("/proc/self/exe").expect("our own file");
        let start = &whole[..whole.len().min(4096)];
        for length in 0..start.len().min(1024) {
            let _ = of_bytes(&start[..length]);
        }
        for position in 0..start.len().min(1024) {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut damaged = start.to_vec();
                damaged[position] = value;
                if let Some(id) = of_bytes(&damaged) {
                    assert!(id.len() <= MAX_BUILD_ID_BYTES);
                }
            }
        }
    }
}
