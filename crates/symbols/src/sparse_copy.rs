//! A sparse in-memory copy of a module: its symbols and debug information at their original offsets, holes elsewhere.
//!
//! The symbolizer maps the files that it reads. A target could truncate its file while it is mapped, which would raise
//! SIGBUS in heapbpf. So the symbolizer maps only such copies.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use heapbpf_elf::{Elf, Section};
use heapbpf_unwind::image::Image;
use rustix::fs::{MemfdFlags, memfd_create};

/// Bytes copied at a time.
const CHUNK_BYTES: usize = 1 << 20;
/// Maximum size of a symbol table that is copied, bytes.
const MAX_SYMBOL_BYTES: u64 = 256 << 20;
/// Maximum size of a section that is decompressed, bytes.
const MAX_UNPACKED_BYTES: u64 = 1 << 30;
/// Size of a 64-bit ELF section header.
const SECTION_HEADER_BYTES: usize = 64;
/// Offset of `sh_flags` in a section header.
const FLAGS_AT: u64 = 8;
/// Offset of `sh_offset`.
const OFFSET_AT: u64 = 24;
/// Offset of `sh_size`.
const SIZE_AT: u64 = 32;

/// Which sections are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// Symbol tables only.
    Symbols,
    /// Symbol tables and debug information.
    DebugInformation,
}

/// The copy. Dropping it frees its memory.
pub struct SparseCopy {
    file: File,
    /// Bytes copied.
    pub copied_bytes: u64,
}

/// Bytes of debug information in a file, after decompression. A section with an invalid size counts as `u64::MAX`.
pub fn debug_bytes(image: &dyn Image, elf: &Elf) -> u64 {
    let sections = elf.sections.iter().filter(|section| is_debug(section));
    sections.map(|section| section.plain_bytes(image).unwrap_or(u64::MAX)).fold(0, u64::saturating_add)
}

fn is_debug(section: &Section) -> bool {
    section.kind != heapbpf_elf::SHT_NOBITS && section.name.starts_with(".debug_")
}

fn is_symbols(section: &Section) -> bool {
    matches!(&*section.name, ".symtab" | ".strtab" | ".dynsym" | ".dynstr" | ".shstrtab" | ".symtab_shndx")
        && section.bytes <= MAX_SYMBOL_BYTES
        && !section.is_compressed()
}

impl SparseCopy {
    /// Copies the sections that `contents` selects from `image`.
    ///
    /// # Errors
    /// The operating system's error, or `InvalidData` if the headers contradict themselves.
    pub fn new(image: &dyn Image, elf: &Elf, contents: Contents) -> io::Result<Self> {
        let file = File::from(memfd_create(c"heapbpf-symbols", MemfdFlags::CLOEXEC)?);
        file.set_len(image.length_bytes()?)?;
        let mut copy = Self { file, copied_bytes: 0 };
        for (offset, bytes) in &elf.tables {
            copy.copy_range(image, *offset, *bytes)?;
        }
        for (index, section) in elf.sections.iter().enumerate() {
            let wanted = is_symbols(section) || (contents == Contents::DebugInformation && is_debug(section));
            if wanted && section.is_compressed() {
                copy.unpack(image, elf, index, section)?;
            } else if wanted {
                copy.copy_range(image, section.offset, section.bytes)?;
            } else if section.kind != heapbpf_elf::SHT_NOBITS {
                copy.forget_name(elf, index)?;
            }
        }
        Ok(copy)
    }

    /// A path that opens the copy, valid while this value exists.
    pub fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.file.as_raw_fd()).into()
    }

    fn copy_range(&mut self, image: &dyn Image, offset: u64, bytes: u64) -> io::Result<()> {
        let end = offset.checked_add(bytes).ok_or(io::ErrorKind::InvalidData)?;
        let mut buffer = vec![0; CHUNK_BYTES.min(usize::try_from(bytes).unwrap_or(CHUNK_BYTES))];
        let mut at = offset;
        while at < end {
            let length = buffer.len().min(usize::try_from(end - at).unwrap_or(CHUNK_BYTES));
            image.read_at(at, &mut buffer[..length])?;
            self.file.write_all_at(&buffer[..length], at)?;
            at += length as u64;
        }
        self.copied_bytes += bytes;
        Ok(())
    }

    /// Appends a section's decompressed bytes and points its header there, so that the symbolizer never decompresses.
    /// Compressed bytes can expand a thousandfold, whatever their header claims; here the size is bounded.
    fn unpack(&mut self, image: &dyn Image, elf: &Elf, index: usize, section: &Section) -> io::Result<()> {
        let plain = section.read(image, MAX_UNPACKED_BYTES).map_err(io::Error::other)?;
        let end = self.file.metadata()?.len();
        self.file.write_all_at(&plain, end)?;
        self.copied_bytes += plain.len() as u64;
        self.patch(elf, index, FLAGS_AT, &section.flags_when_plain().to_le_bytes())?;
        self.patch(elf, index, OFFSET_AT, &end.to_le_bytes())?;
        self.patch(elf, index, SIZE_AT, &(plain.len() as u64).to_le_bytes())
    }

    /// Erases the name of a section that was not copied, because it would read as zeros. Code is still located by the
    /// program headers.
    fn forget_name(&mut self, elf: &Elf, index: usize) -> io::Result<()> {
        // Section 0 has no name, and its fields may hold the size of the section table.
        if index == 0 { Ok(()) } else { self.patch(elf, index, 0, &0u32.to_le_bytes()) }
    }

    /// Overwrites a field of a section header.
    fn patch(&mut self, elf: &Elf, index: usize, field: u64, bytes: &[u8]) -> io::Result<()> {
        let Some(table) = elf.section_headers_at else { return Ok(()) };
        let header = (index * SECTION_HEADER_BYTES) as u64;
        let at = table.checked_add(header + field).ok_or(io::ErrorKind::InvalidData)?;
        self.file.write_all_at(bytes, at)
    }
}
