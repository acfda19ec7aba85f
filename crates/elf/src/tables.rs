//! The header tables of ELF files of either class, within limits.

use object::elf;
use object::read::ReadRef;
use object::read::elf::{FileHeader, SectionHeader as _};

use crate::{ElfError, MAX_SECTION_NAME_BYTES, MAX_SECTIONS, MAX_SEGMENTS};

/// Returns the program headers, unless there are too many.
pub(crate) fn program_headers<'d, H: FileHeader, R: ReadRef<'d>>(
    header: &H,
    endian: H::Endian,
    data: R,
) -> Result<&'d [H::ProgramHeader], ElfError> {
    const WHAT: &str = "program headers";
    let count = header.phnum(endian, data).map_err(|_| ElfError::Malformed(WHAT))? as usize;
    let is_usual = usize::from(header.e_phentsize(endian)) == size_of::<H::ProgramHeader>();
    if count > MAX_SEGMENTS || (count > 0 && !is_usual) {
        return Err(ElfError::Malformed(WHAT));
    }
    let cut = |_| ElfError::Table { what: WHAT, error: std::io::ErrorKind::UnexpectedEof.into() };
    header.program_headers(endian, data).map_err(cut)
}

/// Returns the section headers, unless they cannot be read or there are too many.
pub(crate) fn section_headers<'d, H: FileHeader, R: ReadRef<'d>>(
    header: &H,
    endian: H::Endian,
    data: R,
) -> Option<&'d [H::SectionHeader]> {
    let count = header.shnum(endian, data).ok()? as usize;
    (count <= MAX_SECTIONS).then(|| header.section_headers(endian, data).ok()).flatten()
}

/// Returns the string table with the section names; empty if the file has none.
pub(crate) fn section_names<'d, H: FileHeader, R: ReadRef<'d>>(
    header: &H,
    endian: H::Endian,
    data: R,
    sections: &[H::SectionHeader],
) -> Option<&'d [u8]> {
    if sections.is_empty() || header.e_shstrndx(endian) == elf::SHN_UNDEF {
        return Some(&[]);
    }
    let names = sections.get(header.section_strings_index(endian, data).ok()?.0)?;
    let (offset, bytes) = names.file_range(endian)?;
    (bytes <= MAX_SECTION_NAME_BYTES).then(|| data.read_bytes_at(offset, bytes).ok()).flatten()
}
