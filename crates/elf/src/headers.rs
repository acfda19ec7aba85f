//! The headers of an ELF file, which map between addresses and file offsets, and sections with their contents,
//! decompressed.

use std::io::Read as _;

use object::LittleEndian;
use object::elf::{self, CompressionHeader64};
use object::read::ReadRef;
use object::read::elf::{CompressionHeader as _, FileHeader, SectionHeader as _};

use crate::{ElfError, Image, MAX_SECTION_NAME_BYTES, MAX_SECTIONS, MAX_SEGMENTS, read_range};

/// Type of the segment that holds `.eh_frame_hdr`. Files without section headers have it, too.
pub const PT_GNU_EH_FRAME: u32 = elf::PT_GNU_EH_FRAME.0;

/// A program header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// `PT_*`.
    pub kind: u32,
    pub(crate) flags: elf::ProgramFlags,
    /// File offset, bytes.
    pub offset: u64,
    /// Virtual address, as the file states it.
    pub address: u64,
    /// Size in the file, bytes.
    pub file_bytes: u64,
    pub(crate) memory_bytes: u64,
}

impl Segment {
    /// Whether it is mapped into the process.
    #[must_use]
    pub fn is_loaded(&self) -> bool {
        self.kind == elf::PT_LOAD.0
    }

    /// Returns how far a process's addresses are from those that the file states, given that the process has mapped the
    /// file at `start` from `file_offset` on; `None` if that offset is not in this segment. A mapping begins at a page
    /// boundary, and may begin before its segment. `page_bytes` is the page size, a power of two.
    #[must_use]
    pub fn bias(&self, start: u64, file_offset: u64, page_bytes: u64) -> Option<u64> {
        let first = self.offset & !page_bytes.checked_sub(1)?;
        let is_mapped = (first..self.offset.saturating_add(self.file_bytes)).contains(&file_offset);
        is_mapped.then(|| start.wrapping_sub(file_offset).wrapping_sub(self.address.wrapping_sub(self.offset)))
    }

    /// Whether it is mapped for execution.
    #[must_use]
    pub fn is_executable(&self) -> bool {
        self.is_loaded() && self.flags.contains(elf::PF_X)
    }

    /// Whether it is mapped for writing.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.is_loaded() && self.flags.contains(elf::PF_W)
    }

    /// Returns the same segment, cut to the part that a file of `length_bytes` contains.
    #[must_use]
    pub fn within(self, length_bytes: u64) -> Self {
        Self { file_bytes: self.file_bytes.min(length_bytes.saturating_sub(self.offset)), ..self }
    }

    /// The addresses that it occupies in memory, as the file states them.
    #[must_use]
    pub fn addresses(&self) -> std::ops::Range<u64> {
        self.address..self.address.saturating_add(self.memory_bytes)
    }

    /// Whether it is mapped, and `address` is in the part of it that comes from the file.
    #[must_use]
    pub fn holds(&self, address: u64) -> bool {
        self.is_loaded() && address.checked_sub(self.address).is_some_and(|at| at < self.file_bytes)
    }

    /// Returns the file offset of `address`; `None` if it is not in this segment.
    #[must_use]
    pub fn offset_of_address(&self, address: u64) -> Option<u64> {
        self.holds(address).then(|| self.offset.checked_add(address - self.address)).flatten()
    }
}

/// The headers of a 64-bit little-endian ELF file.
#[derive(Clone, Debug)]
pub struct Elf {
    /// Address of the entry point, as the file states it; 0 if it has none.
    pub entry: u64,
    /// `EM_*`: the instruction set.
    pub machine: u16,
    /// Program headers.
    pub segments: Vec<Segment>,
    /// Section headers; empty if the file has none.
    pub sections: Vec<Section>,
    /// Whether the file claims section headers that cannot be read or are malformed.
    pub sections_are_damaged: bool,
    /// File ranges of the header tables: (offset, bytes).
    pub tables: Vec<(u64, u64)>,
    /// File offset of the section headers, if there are any.
    pub section_headers_at: Option<u64>,
}

impl Elf {
    /// Returns the address that the file states for its byte `offset`. If several segments contain it, an executable
    /// one is preferred.
    #[must_use]
    pub fn address_of_offset(&self, offset: u64) -> Option<u64> {
        let holds = |segment: &&Segment| {
            segment.is_loaded() && offset.checked_sub(segment.offset).is_some_and(|at| at < segment.file_bytes)
        };
        let mut candidates = self.segments.iter().filter(holds);
        let segment = candidates.clone().find(|segment| segment.is_executable()).or_else(|| candidates.next())?;
        Some(segment.address.wrapping_add(offset - segment.offset))
    }

    /// Whether this file holds only debug information, without the code that it describes.
    #[must_use]
    pub fn is_debug_only(&self) -> bool {
        self.sections.iter().any(|section| section.name == ".text" && section.kind == SHT_NOBITS)
    }

    /// Returns the address of the code at `past_start` bytes from the start of an executable mapping of `mapped_bytes`.
    ///
    /// This is for files of debug information, which have the program's addresses but not its file offsets.
    /// `page_bytes` is the page size, a power of two.
    #[must_use]
    pub fn address_in_code(&self, mapped_bytes: u64, past_start: u64, page_bytes: u64) -> Option<u64> {
        let range = |segment: &Segment| {
            let start = segment.address & !page_bytes.checked_sub(1)?;
            let end = segment.address.checked_add(segment.memory_bytes)?.checked_next_multiple_of(page_bytes)?;
            Some((start, end))
        };
        let code = self.segments.iter().filter(|segment| segment.is_executable());
        let code: Vec<(u64, u64)> = code.filter_map(range).collect();
        // If there are several executable segments, the size of the mapping identifies the right one.
        let (start, end) = match code[..] {
            [only] => only,
            _ => *code.iter().find(|(start, end)| end - start == mapped_bytes)?,
        };
        start.checked_add(past_start).filter(|address| *address < end)
    }

    /// Returns the file offset of `address`.
    #[must_use]
    pub fn offset_of_address(&self, address: u64) -> Option<u64> {
        self.segments.iter().find_map(|segment| segment.offset_of_address(address))
    }

    /// Returns the end address, exclusive, of the loaded segment that contains `address`.
    #[must_use]
    pub fn segment_end(&self, address: u64) -> Option<u64> {
        let segment = self.segments.iter().find(|segment| segment.holds(address))?;
        segment.address.checked_add(segment.file_bytes)
    }

    /// Returns the first section with this `name` that has bytes in the file.
    #[must_use]
    pub fn section(&self, name: &str) -> Option<&Section> {
        self.sections.iter().find(|section| section.name == name && section.kind != SHT_NOBITS)
    }
}

/// Type of a section without bytes in the file.
pub const SHT_NOBITS: u32 = elf::SHT_NOBITS.0;
/// Longest section name, bytes; a longer one is treated as missing.
const MAX_NAME_BYTES: usize = 64;
const COMPRESSION_HEADER_BYTES: u64 = size_of::<Header>() as u64;

type Header = CompressionHeader64<LittleEndian>;
const LE: LittleEndian = LittleEndian;

/// A section header.
#[derive(Clone, Debug)]
pub struct Section {
    /// Name; bytes that are not UTF-8 are replaced.
    pub name: String,
    /// `SHT_*`.
    pub kind: u32,
    pub(crate) flags: elf::SectionFlags,
    /// Virtual address, as the file states it.
    pub address: u64,
    /// File offset, bytes.
    pub offset: u64,
    /// Size in the file, bytes.
    pub bytes: u64,
}

impl Section {
    /// Whether it is code.
    #[must_use]
    pub fn is_code(&self) -> bool {
        self.kind == elf::SHT_PROGBITS.0 && self.flags.contains(elf::SHF_EXECINSTR)
    }

    /// Whether the bytes in the file are compressed.
    #[must_use]
    pub fn is_compressed(&self) -> bool {
        self.flags.contains(elf::SHF_COMPRESSED)
    }

    /// Its flags without the compression flag.
    #[must_use]
    pub fn flags_when_plain(&self) -> u64 {
        self.flags.0 & !elf::SHF_COMPRESSED.0
    }

    /// Size of the section when decompressed, bytes, as its header claims.
    ///
    /// # Errors
    /// [`ElfError`] if the section exceeds a limit, lies past the end of the file, or is malformed.
    pub fn plain_bytes(&self, image: &dyn Image) -> Result<u64, ElfError> {
        if !self.is_compressed() {
            return Ok(self.bytes);
        }
        let header = read_range(image, &self.name, self.offset, COMPRESSION_HEADER_BYTES, COMPRESSION_HEADER_BYTES)?;
        Ok(compression(&header)?.0.ch_size(LE))
    }

    /// Reads the section, and decompresses it if it is compressed. Neither size may exceed `limit` bytes.
    ///
    /// # Errors
    /// [`ElfError`] if the section exceeds a limit, lies past the end of the file, or is malformed.
    pub fn read(&self, image: &dyn Image, limit: u64) -> Result<Vec<u8>, ElfError> {
        let raw = read_range(image, &self.name, self.offset, self.bytes, limit)?;
        if !self.is_compressed() {
            return Ok(raw);
        }
        let (header, packed) = compression(&raw)?;
        let bytes = header.ch_size(LE);
        if bytes > limit {
            return Err(ElfError::TooLarge { what: self.name.clone(), bytes, limit });
        }
        let mut plain = Vec::new();
        match header.ch_type(LE) {
            elf::ELFCOMPRESS_ZLIB => flate2::read::ZlibDecoder::new(packed).take(bytes).read_to_end(&mut plain)?,
            // The library limits the window size that a frame may request (100 MiB).
            elf::ELFCOMPRESS_ZSTD => {
                let decoder = ruzstd::decoding::StreamingDecoder::new(packed);
                let decoder = decoder.map_err(|_| ElfError::Malformed("compressed section"))?;
                decoder.take(bytes).read_to_end(&mut plain)?
            }
            _ => return Err(ElfError::Malformed("section compressed in an unknown way")),
        };
        Ok(plain)
    }
}

/// Splits a compressed section into its header and the compressed bytes.
fn compression(raw: &[u8]) -> Result<(&Header, &[u8]), ElfError> {
    object::pod::from_bytes(raw).map_err(|()| ElfError::Malformed("compressed section"))
}

/// Returns the name at offset `start` of the section name table.
pub(crate) fn name_at(names: &[u8], start: u32) -> String {
    let rest = names.get(start as usize..).unwrap_or_default();
    let end = rest.iter().take(MAX_NAME_BYTES).position(|byte| *byte == 0).unwrap_or(0);
    String::from_utf8_lossy(&rest[..end]).into_owned()
}

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
