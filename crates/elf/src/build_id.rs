//! GNU build IDs of files of any class and byte order.

use object::Endianness;
use object::elf::{self, FileHeader32, FileHeader64};
use object::read::elf::{FileHeader, NoteIterator, ProgramHeader, SectionHeader};

use crate::tables::{program_headers, section_headers};
use crate::{Image, Pieces, read_range};

/// Longest valid build ID, bytes (SHA-1 has 20, SHA-256 32).
pub const MAX_BYTES: usize = 64;
/// Largest segment or section of notes that is read, bytes; those of real files are far smaller.
const MAX_NOTE_BYTES: u64 = 64 << 10;
/// Most segments of notes that are read, and most sections.
const MAX_NOTE_RANGES: usize = 16;
/// Largest table of headers, bytes: that of [`MAX_SECTIONS`](crate::MAX_SECTIONS).
const MAX_TABLE_BYTES: u64 = 4 << 20;

/// A range of notes in a file.
struct NoteRange {
    offset: u64,
    bytes: u64,
    align: u64,
}

/// The build ID of an ELF file; `None` if it has none, or a malformed one.
///
/// Notes are found by the program headers, which every executable file has, else by the section headers.
#[must_use]
pub fn of(image: &dyn Image) -> Option<Vec<u8>> {
    let mut start = [0; 5];
    image.read_at(0, &mut start).ok()?;
    match elf::FileClass(start[4]) {
        elf::ELFCLASS32 => of_class::<FileHeader32<Endianness>>(image),
        elf::ELFCLASS64 => of_class::<FileHeader64<Endianness>>(image),
        _ => None,
    }
}

fn of_class<H: FileHeader<Endian = Endianness>>(image: &dyn Image) -> Option<Vec<u8>> {
    let pieces = Pieces::within(image, MAX_TABLE_BYTES, 2 * MAX_TABLE_BYTES);
    let data = &pieces;
    let header = H::parse(data).ok()?;
    let endian = header.endian().ok()?;
    let in_notes = |range: NoteRange| {
        let notes = read_range(image, "notes", range.offset, range.bytes, MAX_NOTE_BYTES).ok()?;
        in_notes(endian, range.align, &notes)
    };
    let programs = program_headers(header, endian, data).unwrap_or_default();
    let segments = programs.iter().filter(|program| program.p_type(endian) == elf::PT_NOTE).map(|program| {
        let (offset, bytes) = program.file_range(endian);
        NoteRange { offset, bytes, align: program.p_align(endian).into() }
    });
    segments.take(MAX_NOTE_RANGES).find_map(in_notes).or_else(|| {
        let sections = section_headers(header, endian, data).unwrap_or_default();
        let notes = sections.iter().filter(|section| section.sh_type(endian) == elf::SHT_NOTE).filter_map(|section| {
            let (offset, bytes) = section.file_range(endian)?;
            Some(NoteRange { offset, bytes, align: section.sh_addralign(endian).into() })
        });
        notes.take(MAX_NOTE_RANGES).find_map(in_notes)
    })
}

fn in_notes(endian: Endianness, align: u64, notes: &[u8]) -> Option<Vec<u8>> {
    // Headers of notes are the same in both classes. By convention, an alignment that is neither 4 nor 8 means 4.
    let align = if align == 8 { 8 } else { 4 };
    let mut notes = NoteIterator::<FileHeader64<Endianness>>::new(endian, align, notes).ok()?;
    while let Ok(Some(note)) = notes.next() {
        if note.n_type(endian) == elf::NT_GNU_BUILD_ID && note.name() == elf::ELF_NOTE_GNU {
            return (1..=MAX_BYTES).contains(&note.desc().len()).then(|| note.desc().to_vec());
        }
    }
    None
}
