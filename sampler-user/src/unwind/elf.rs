//! The little of ELF that unwinding and symbolization need, read piecewise from an [`Image`] and bounded throughout.

use std::io::Read;

use super::image::Image;

/// Most program headers that are read.
const MAX_SEGMENTS: u16 = 256;
/// Most section headers that are read.
const MAX_SECTIONS: u64 = 4096;
/// Most bytes of section names.
const MAX_NAME_BYTES: u64 = 1 << 20;
/// Most bytes of notes that are searched for the build ID.
const MAX_NOTE_BYTES: u64 = 64 << 10;

const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
/// Segment that holds `.eh_frame_hdr`, also in files without section headers.
pub const PT_GNU_EH_FRAME: u32 = 0x6474_e550;
const PF_X: u32 = 1;
/// Section without bytes in the file.
pub const SHT_NOBITS: u32 = 8;
const SHF_COMPRESSED: u64 = 0x800;
const COMPRESSION_HEADER_BYTES: u64 = 24;
const ELFCOMPRESS_ZLIB: u32 = 1;
const ELFCOMPRESS_ZSTD: u32 = 2;
const NT_GNU_BUILD_ID: u32 = 3;

/// Why an ELF file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ElfError {
    /// The file cannot be read, or is shorter than it says.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// Not an ELF file of this machine's kind.
    #[error("not a 64-bit little-endian ELF file")]
    NotElf,
    /// Something in it makes no sense.
    #[error("malformed ELF file: {0}")]
    Malformed(&'static str),
    /// Something is larger than allowed.
    #[error("{what} has {bytes} bytes, more than the {limit} that are allowed")]
    TooLarge {
        /// What.
        what: String,
        /// Its size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
}

/// A program header.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// `PT_*`.
    pub kind: u32,
    flags: u32,
    /// Where it is in the file.
    pub offset: u64,
    /// Its address as the file states it.
    pub address: u64,
    /// Bytes in the file.
    pub file_bytes: u64,
    memory_bytes: u64,
}

/// A section header.
#[derive(Clone, Debug)]
pub struct Section {
    /// Name, as far as it is UTF-8.
    pub name: String,
    /// `SHT_*`.
    pub kind: u32,
    flags: u64,
    /// Address as the file states it.
    pub address: u64,
    /// Where it is in the file.
    pub offset: u64,
    /// Bytes in the file.
    pub bytes: u64,
}

/// Headers of an ELF file.
#[derive(Clone, Debug)]
pub struct Elf {
    /// Address of the entry point as the file states it, 0 if it has none.
    pub entry: u64,
    /// `ET_*`: 2 for a program at fixed addresses, 3 for everything else that is mapped.
    pub kind: u16,
    /// Program headers.
    pub segments: Vec<Segment>,
    /// Section headers; empty if the file has none (or has lost them).
    pub sections: Vec<Section>,
    /// File ranges of the header tables: (offset, bytes).
    pub tables: Vec<(u64, u64)>,
    /// File offset of the section headers, if there are any.
    pub section_headers_at: Option<u64>,
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Reads `bytes` bytes at `offset`, if that is at most `limit` and lies within the file.
///
/// # Errors
/// [`ElfError::TooLarge`], or [`ElfError::Io`].
pub fn read_range(image: &dyn Image, what: &str, offset: u64, bytes: u64, limit: u64) -> Result<Vec<u8>, ElfError> {
    if bytes > limit {
        return Err(ElfError::TooLarge { what: what.into(), bytes, limit });
    }
    // Ask for the length first, so that a header's lie does not make us allocate for nothing.
    let within = offset.checked_add(bytes).is_some_and(|end| image.length_bytes().is_ok_and(|length| end <= length));
    if !within {
        return Err(ElfError::Io(std::io::ErrorKind::UnexpectedEof.into()));
    }
    let mut buffer = vec![0; usize::try_from(bytes).map_err(|_| ElfError::Malformed("size"))?];
    image.read_at(offset, &mut buffer)?;
    Ok(buffer)
}

impl Elf {
    /// Reads the headers.
    ///
    /// # Errors
    /// [`ElfError`]; missing or senseless section headers are no error (programs run without them).
    pub fn read(image: &dyn Image) -> Result<Self, ElfError> {
        let mut header = [0; 64];
        image.read_at(0, &mut header)?;
        // 64-bit, little-endian.
        if !header.starts_with(b"\x7fELF\x02\x01") {
            return Err(ElfError::NotElf);
        }
        let malformed = ElfError::Malformed("header");
        let parsed = (|| {
            Some((
                u16_at(&header, 16)?,
                u64_at(&header, 24)?,
                u64_at(&header, 32)?,
                u64_at(&header, 40)?,
                u16_at(&header, 54)?,
                u16_at(&header, 56)?,
                u16_at(&header, 58)?,
            ))
        })();
        let Some((kind, entry, segments_at, sections_at, segment_bytes, segment_count, section_bytes)) = parsed else {
            return Err(malformed);
        };
        let mut elf =
            Self { entry, kind, segments: vec![], sections: vec![], tables: vec![(0, 64)], section_headers_at: None };
        if segment_count > 0 {
            if segment_bytes != 56 || segment_count > MAX_SEGMENTS {
                return Err(ElfError::Malformed("program headers"));
            }
            let bytes = u64::from(segment_count) * 56;
            let table = read_range(image, "program headers", segments_at, bytes, u64::MAX)?;
            elf.segments = table.chunks_exact(56).filter_map(Segment::parse).collect();
            elf.tables.push((segments_at, bytes));
        }
        if section_bytes == 64
            && sections_at != 0
            && let Some((sections, table_bytes)) = read_sections(image, &header, sections_at)
        {
            elf.sections = sections;
            elf.tables.push((sections_at, table_bytes));
            elf.section_headers_at = Some(sections_at);
        }
        Ok(elf)
    }

    /// The address, as the file states addresses, of what lies at `offset` in the file; code first.
    pub fn address_of_offset(&self, offset: u64) -> Option<u64> {
        let holds = |segment: &&Segment| {
            segment.kind == PT_LOAD && offset.checked_sub(segment.offset).is_some_and(|at| at < segment.file_bytes)
        };
        let mut candidates = self.segments.iter().filter(holds);
        let segment = candidates.clone().find(|segment| segment.flags & PF_X != 0).or_else(|| candidates.next())?;
        Some(segment.address.wrapping_add(offset - segment.offset))
    }

    /// Whether this is the debug information of another file, whose code it has not.
    pub fn is_debug_only(&self) -> bool {
        self.sections.iter().any(|section| section.name == ".text" && section.kind == SHT_NOBITS)
    }

    /// The address of what lies `past_start` bytes behind the start of the program's executable mapping of
    /// `mapped_bytes`. That is for a file that has lost the program's file offsets, but not its addresses.
    pub fn address_in_code(&self, mapped_bytes: u64, past_start: u64) -> Option<u64> {
        let page = procfs::page_size();
        let is_code = |segment: &&Segment| segment.kind == PT_LOAD && segment.flags & PF_X != 0;
        let range = |segment: &Segment| {
            let start = segment.address & !(page - 1);
            let end = segment.address.checked_add(segment.memory_bytes)?.checked_next_multiple_of(page)?;
            Some((start, end))
        };
        let code: Vec<(u64, u64)> = self.segments.iter().filter(is_code).filter_map(range).collect();
        // Of several pieces of code the mapping's size tells which one it is.
        let (start, end) = match code[..] {
            [only] => only,
            _ => *code.iter().find(|(start, end)| end - start == mapped_bytes)?,
        };
        start.checked_add(past_start).filter(|address| *address < end)
    }

    /// The file offset of `address`.
    pub fn offset_of_address(&self, address: u64) -> Option<u64> {
        let within = |segment: &&Segment| {
            segment.kind == PT_LOAD && address.checked_sub(segment.address).is_some_and(|at| at < segment.file_bytes)
        };
        let segment = self.segments.iter().find(within)?;
        segment.offset.checked_add(address - segment.address)
    }

    /// End of the loaded segment that holds `address`, as address.
    pub fn segment_end(&self, address: u64) -> Option<u64> {
        let within = |segment: &&Segment| {
            segment.kind == PT_LOAD && address.checked_sub(segment.address).is_some_and(|at| at < segment.file_bytes)
        };
        let segment = self.segments.iter().find(within)?;
        segment.address.checked_add(segment.file_bytes)
    }

    /// The section called `name` that has bytes in the file.
    pub fn section(&self, name: &str) -> Option<&Section> {
        self.sections.iter().find(|section| section.name == name && section.kind != SHT_NOBITS)
    }

    /// The GNU build ID.
    pub fn build_id(&self, image: &dyn Image) -> Option<Vec<u8>> {
        let notes = self.segments.iter().filter(|segment| segment.kind == PT_NOTE);
        let segments = notes.map(|segment| (segment.offset, segment.file_bytes));
        let sections = self.section(".note.gnu.build-id").map(|section| (section.offset, section.bytes));
        segments
            .chain(sections)
            .filter_map(|(offset, bytes)| read_range(image, "notes", offset, bytes, MAX_NOTE_BYTES).ok())
            .find_map(|notes| find_build_id(&notes))
    }
}

impl Segment {
    fn parse(bytes: &[u8]) -> Option<Self> {
        Some(Self {
            kind: u32_at(bytes, 0)?,
            flags: u32_at(bytes, 4)?,
            offset: u64_at(bytes, 8)?,
            address: u64_at(bytes, 16)?,
            file_bytes: u64_at(bytes, 32)?,
            memory_bytes: u64_at(bytes, 40)?,
        })
    }
}

impl Section {
    /// Whether the bytes in the file are compressed.
    pub fn is_compressed(&self) -> bool {
        self.flags & SHF_COMPRESSED != 0
    }

    /// Its flags without the one that says that it is compressed.
    pub fn flags_when_plain(&self) -> u64 {
        self.flags & !SHF_COMPRESSED
    }

    /// Bytes that the section has once it is decompressed, by its own account.
    ///
    /// # Errors
    /// [`ElfError`].
    pub fn plain_bytes(&self, image: &dyn Image) -> Result<u64, ElfError> {
        if !self.is_compressed() {
            return Ok(self.bytes);
        }
        let header = read_range(image, &self.name, self.offset, COMPRESSION_HEADER_BYTES, COMPRESSION_HEADER_BYTES)?;
        u64_at(&header, 8).ok_or(ElfError::Malformed("compressed section"))
    }

    /// Reads the section's bytes, decompressed if need be; both sizes are at most `limit`.
    ///
    /// # Errors
    /// [`ElfError`].
    pub fn read(&self, image: &dyn Image, limit: u64) -> Result<Vec<u8>, ElfError> {
        let raw = read_range(image, &self.name, self.offset, self.bytes, limit)?;
        if !self.is_compressed() {
            return Ok(raw);
        }
        let (Some(kind), Some(bytes)) = (u32_at(&raw, 0), u64_at(&raw, 8)) else {
            return Err(ElfError::Malformed("compressed section"));
        };
        if bytes > limit {
            return Err(ElfError::TooLarge { what: self.name.clone(), bytes, limit });
        }
        let packed = raw.get(COMPRESSION_HEADER_BYTES as usize..).ok_or(ElfError::Malformed("compressed section"))?;
        let mut plain = Vec::new();
        match kind {
            ELFCOMPRESS_ZLIB => flate2::read::ZlibDecoder::new(packed).take(bytes).read_to_end(&mut plain)?,
            // Its window, which a frame chooses, is bounded by the library (100 MiB).
            ELFCOMPRESS_ZSTD => {
                let decoder = ruzstd::decoding::StreamingDecoder::new(packed);
                let decoder = decoder.map_err(|_| ElfError::Malformed("compressed section"))?;
                decoder.take(bytes).read_to_end(&mut plain)?
            }
            _ => return Err(ElfError::Malformed("section compressed in an unknown way")),
        };
        Ok(plain)
    }
}

fn read_sections(image: &dyn Image, header: &[u8; 64], at: u64) -> Option<(Vec<Section>, u64)> {
    let mut count = u64::from(u16_at(header, 60)?);
    let mut names_index = usize::from(u16_at(header, 62)?);
    let first = read_range(image, "section headers", at, 64, 64).ok()?;
    // Large counts are kept in the first, otherwise empty, header.
    if count == 0 {
        count = u64_at(&first, 32)?;
    }
    if names_index == 0xffff {
        names_index = u32_at(&first, 40)? as usize;
    }
    if count > MAX_SECTIONS {
        return None;
    }
    let table = read_range(image, "section headers", at, count * 64, MAX_SECTIONS * 64).ok()?;
    let names_header = table.get(names_index.checked_mul(64)?..)?;
    let (names_at, names_bytes) = (u64_at(names_header, 24)?, u64_at(names_header, 32)?);
    let names = read_range(image, "section names", names_at, names_bytes, MAX_NAME_BYTES).ok()?;
    let name = |start: u32| {
        let bytes = names.get(start as usize..).unwrap_or_default();
        let end = bytes.iter().take(64).position(|byte| *byte == 0).unwrap_or(0);
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    };
    let sections = table.chunks_exact(64).filter_map(|bytes| {
        Some(Section {
            name: name(u32_at(bytes, 0)?),
            kind: u32_at(bytes, 4)?,
            flags: u64_at(bytes, 8)?,
            address: u64_at(bytes, 16)?,
            offset: u64_at(bytes, 24)?,
            bytes: u64_at(bytes, 32)?,
        })
    });
    Some((sections.collect(), count * 64))
}

fn find_build_id(mut notes: &[u8]) -> Option<Vec<u8>> {
    loop {
        let (name_bytes, data_bytes, kind) =
            (u32_at(notes, 0)? as usize, u32_at(notes, 4)? as usize, u32_at(notes, 8)?);
        let data_at = 12usize.checked_add(name_bytes.checked_next_multiple_of(4)?)?;
        let data = notes.get(data_at..data_at.checked_add(data_bytes)?)?;
        if kind == NT_GNU_BUILD_ID && notes.get(12..12 + name_bytes)? == b"GNU\0" {
            return (!data.is_empty() && data.len() <= 64).then(|| data.to_vec());
        }
        notes = notes.get(data_at.checked_add(data_bytes.checked_next_multiple_of(4)?)?..)?;
    }
}
