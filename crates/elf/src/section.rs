//! Sections and their contents, decompressed.

use std::io::Read as _;

use object::LittleEndian;
use object::elf::{self, CompressionHeader64};
use object::read::elf::CompressionHeader as _;

use crate::{ElfError, Image, read_range};

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
