//! GNU build IDs of files of any class and byte order.

use object::Endianness;
use object::elf::{self, FileHeader32, FileHeader64};
use object::read::elf::{FileHeader, NoteIterator, ProgramHeader, SectionHeader};

use crate::headers::{program_headers, section_headers};
use crate::{Image, Pieces, read_range};

/// Longest valid build ID, bytes (SHA-1 has 20, SHA-256 32).
pub const MAX_BYTES: usize = 64;
/// Largest note segment or section that is read, bytes. Real files have far smaller ones.
const MAX_NOTE_BYTES: u64 = 64 << 10;
/// Maximum number of note segments that are read, and of note sections.
const MAX_NOTE_RANGES: usize = 16;
/// Largest header table that is read, bytes: that of [`MAX_SECTIONS`](crate::MAX_SECTIONS).
const MAX_TABLE_BYTES: u64 = 4 << 20;

/// Returns the build ID of an ELF file; `None` if it has none, or a malformed one.
///
/// Searches the note segments first, because every executable file has program headers, and then the note sections.
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
    // The file range of a block of notes, and the alignment of each.
    let in_notes = |((offset, bytes), align): ((u64, u64), u64)| {
        let notes = read_range(image, "notes", offset, bytes, MAX_NOTE_BYTES).ok()?;
        in_notes(endian, align, &notes)
    };
    let programs = program_headers(header, endian, data).unwrap_or_default();
    let segments = programs.iter().filter(|program| program.p_type(endian) == elf::PT_NOTE);
    let segments = segments.map(|program| (program.file_range(endian), program.p_align(endian).into()));
    segments.take(MAX_NOTE_RANGES).find_map(in_notes).or_else(|| {
        let sections = section_headers(header, endian, data).unwrap_or_default();
        let notes = sections.iter().filter(|section| section.sh_type(endian) == elf::SHT_NOTE);
        let notes =
            notes.filter_map(|section| Some((section.file_range(endian)?, section.sh_addralign(endian).into())));
        notes.take(MAX_NOTE_RANGES).find_map(in_notes)
    })
}

fn in_notes(endian: Endianness, align: u64, notes: &[u8]) -> Option<Vec<u8>> {
    // Note headers are the same in both classes. By convention, an alignment that is neither 4 nor 8 means 4.
    let align = if align == 8 { 8 } else { 4 };
    let mut notes = NoteIterator::<FileHeader64<Endianness>>::new(endian, align, notes).ok()?;
    while let Ok(Some(note)) = notes.next() {
        if note.n_type(endian) == elf::NT_GNU_BUILD_ID && note.name() == elf::ELF_NOTE_GNU {
            return (1..=MAX_BYTES).contains(&note.desc().len()).then(|| note.desc().to_vec());
        }
    }
    None
}
