//! Reads ELF files that may be hostile, in bounded pieces.
//!
//! Bytes come from an [`Image`]: a file, which is read with `pread` and never mapped, or bytes in memory. The
//! [`object`] crate parses them through [`Pieces`], which limits each read and all reads of one file together.
//!
//! ```
//! use heapbpf_elf::{Elf, build_id};
//!
//! let program = std::fs::File::open("/proc/self/exe")?;
//! let elf = Elf::read(&program)?;
//! // File offsets and addresses, as a profiler converts them.
//! let offset = elf.offset_of_address(elf.entry).expect("the entry point is in the file");
//! assert_eq!(elf.address_of_offset(offset), Some(elf.entry));
//! // Contents of a section, decompressed if need be, at most a mebibyte.
//! let section = elf.section(".comment").map(|section| section.read(&program, 1 << 20)).transpose()?;
//! assert!(section.is_none_or(|bytes| bytes.len() <= 1 << 20));
//! assert!(build_id::of(&program).is_none_or(|id| id.len() <= build_id::MAX_BYTES));
//! # Ok::<(), heapbpf_elf::ElfError>(())
//! ```

#![forbid(unsafe_code)]

pub mod bounded;
pub mod build_id;
pub mod debug_link;
pub mod file;
#[cfg(test)]
mod fuzzed;
pub mod headers;
pub mod image;
pub mod symbols;

// Code shared with fuzz targets refers to the crate by name.
#[cfg(test)]
extern crate self as heapbpf_elf;

pub use bounded::Pieces;
pub use file::{Dynamic, DynamicNames, ElfFile, Relocation};
pub use headers::{Elf, PT_GNU_EH_FRAME, SHT_NOBITS, Section, Segment};
pub use image::{ElfError, Image, Memory, read_range};
pub use symbols::{Symbol, Symbols, unpack_debugdata};

/// Maximum number of program headers that are read. Linux does not run a file with more than 64 KiB of them.
pub const MAX_SEGMENTS: usize = (64 << 10) / 56;
/// Maximum number of section headers that are read.
pub const MAX_SECTIONS: usize = 1 << 16;
/// Maximum size of the section name table, bytes.
pub const MAX_SECTION_NAME_BYTES: u64 = 4 << 20;
/// Largest single piece that is read through [`Pieces`] (a section, a header table), bytes.
pub const MAX_PIECE_BYTES: u64 = 256 << 20;
/// Maximum bytes read from one file through [`Pieces`]. Several sections may claim the same bytes.
pub const MAX_FILE_BYTES: u64 = 1 << 30;
/// Longest name of a symbol, a library or a version, bytes; a longer one is treated as missing. Without this limit,
/// each of many names that share one string of megabytes would cost its whole length.
pub const MAX_NAME_BYTES: usize = 4096;
/// Maximum number of names in a list (needed libraries, version definitions).
pub const MAX_NAMES: usize = 4096;

/// Whether `image` begins like an ELF file.
#[must_use]
pub fn is_elf(image: &dyn Image) -> bool {
    let mut magic = [0; 4];
    image.read_at(0, &mut magic).is_ok() && magic == object::elf::ELFMAG
}

/// Returns a string in which bytes that are not UTF-8 are written as `\xNN`.
#[must_use]
pub fn escaped(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        chunk.invalid().iter().for_each(|byte| text.push_str(&format!("\\x{byte:02x}")));
    }
    text
}

/// Returns the NUL-terminated string at `at`, if it is UTF-8 and at most [`MAX_NAME_BYTES`] long.
fn text_at(strings: &[u8], at: usize) -> Option<&str> {
    let rest = strings.get(at..)?;
    let rest = &rest[..rest.len().min(MAX_NAME_BYTES + 1)];
    std::str::from_utf8(&rest[..memchr::memchr(0, rest)?]).ok()
}

#[cfg(test)]
mod tests;
