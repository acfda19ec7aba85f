//! A copy of a module's symbols and debug information as a file of our own, in memory.
//!
//! The symbolizer maps the files it reads. A file that belongs to a target could be truncated under it, which is a
//! SIGBUS; so it gets a sparse copy that has the interesting sections at their places and holes everywhere else.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use crate::unwind::elf::{Elf, Section};
use crate::unwind::image::Image;

const CHUNK_BYTES: usize = 1 << 20;
/// Symbol tables above this are left out, bytes.
const MAX_SYMBOL_BYTES: u64 = 256 << 20;
/// Largest section that is decompressed, bytes.
const MAX_UNPACKED_BYTES: u64 = 1 << 30;
const SECTION_HEADER_BYTES: usize = 64;
/// Offsets of fields in a section header.
const FLAGS_AT: u64 = 8;
const OFFSET_AT: u64 = 24;
const SIZE_AT: u64 = 32;

/// What a shadow holds besides symbols.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents {
    /// Symbol tables alone.
    Symbols,
    /// Debug information, too.
    DebugInformation,
}

/// The copy; gone from memory with this value.
pub struct Shadow {
    file: File,
    /// Bytes copied.
    pub copied_bytes: u64,
}

/// Bytes of debug information in a file, decompressed. What lies about its size counts as endless.
pub fn debug_bytes(image: &dyn Image, elf: &Elf) -> u64 {
    let sections = elf.sections.iter().filter(|section| is_debug(section));
    sections.map(|section| section.plain_bytes(image).unwrap_or(u64::MAX)).fold(0, u64::saturating_add)
}

fn is_debug(section: &Section) -> bool {
    section.kind != crate::unwind::elf::SHT_NOBITS && section.name.starts_with(".debug_")
}

fn is_symbols(section: &Section) -> bool {
    matches!(&*section.name, ".symtab" | ".strtab" | ".dynsym" | ".dynstr" | ".shstrtab" | ".symtab_shndx")
        && section.bytes <= MAX_SYMBOL_BYTES
        && !section.is_compressed()
}

impl Shadow {
    /// Copies what `contents` says from `image`.
    ///
    /// # Errors
    /// What the operating system says; `InvalidData` if the file is nonsense.
    pub fn copy(image: &dyn Image, elf: &Elf, contents: Contents) -> io::Result<Self> {
        // SAFETY: the name is a NUL-terminated literal.
        let fd = unsafe { libc::memfd_create(c"heapbpf-symbols".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that nobody else has.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(image.length_bytes()?)?;
        let mut shadow = Self { file, copied_bytes: 0 };
        for (offset, bytes) in &elf.tables {
            shadow.copy_range(image, *offset, *bytes)?;
        }
        for (index, section) in elf.sections.iter().enumerate() {
            let wanted = is_symbols(section) || (contents == Contents::DebugInformation && is_debug(section));
            if wanted && section.is_compressed() {
                shadow.unpack(image, elf, index, section)?;
            } else if wanted {
                shadow.copy_range(image, section.offset, section.bytes)?;
            } else if section.kind != crate::unwind::elf::SHT_NOBITS {
                shadow.forget_name(elf, index)?;
            }
        }
        Ok(shadow)
    }

    /// A path under which the copy can be opened as long as it exists.
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

    /// Puts a section's decompressed bytes at the end. Whoever reads the copy does not decompress any more: packed
    /// bytes can stand for a thousand times as many, whatever their header says.
    fn unpack(&mut self, image: &dyn Image, elf: &Elf, index: usize, section: &Section) -> io::Result<()> {
        let plain = section.read(image, MAX_UNPACKED_BYTES).map_err(io::Error::other)?;
        let end = self.file.metadata()?.len();
        self.file.write_all_at(&plain, end)?;
        self.copied_bytes += plain.len() as u64;
        self.patch(elf, index, FLAGS_AT, &section.flags_when_plain().to_le_bytes())?;
        self.patch(elf, index, OFFSET_AT, &end.to_le_bytes())?;
        self.patch(elf, index, SIZE_AT, &(plain.len() as u64).to_le_bytes())
    }

    /// A section that was not copied must not be found: it would read as zeros. (Code keeps its place and size, which
    /// the program headers give.)
    fn forget_name(&mut self, elf: &Elf, index: usize) -> io::Result<()> {
        // Section 0 has no name to begin with, and may hold the table's size.
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
