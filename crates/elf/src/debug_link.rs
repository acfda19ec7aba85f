//! `.gnu_debuglink` and `.gnu_debugaltlink`: links to the files that hold a file's debug information.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, PathBuf};

use crate::{Elf, Image};

/// Largest `.gnu_debuglink`, bytes: a file name and a checksum.
const MAX_LINK_BYTES: u64 = 4096;

/// A link to a file with debug information.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DebugLink {
    /// Name of the file, without directories.
    pub name: PathBuf,
    /// CRC-32 (IEEE) of the whole file.
    pub checksum: u32,
}

/// Returns the link in a file; `None` if there is none. Rejects a name that contains directories, because the file may
/// be hostile.
#[must_use]
pub fn of(image: &dyn Image, elf: &Elf) -> Option<DebugLink> {
    let link = elf.section(".gnu_debuglink")?.read(image, MAX_LINK_BYTES).ok()?;
    let end = memchr::memchr(0, &link)?;
    let name = PathBuf::from(OsStr::from_bytes(&link[..end]));
    let mut parts = name.components();
    let is_plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
    let checksum = link.get((end + 1).next_multiple_of(4)..)?.first_chunk()?;
    is_plain.then(|| DebugLink { name, checksum: u32::from_le_bytes(*checksum) })
}

/// A link to a file with debug information that several files share (`.gnu_debugaltlink`, made by `dwz`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AltLink {
    /// Path of the file: absolute, or relative to the directory of the file with the link. It may be hostile.
    pub path: PathBuf,
    /// Its build ID.
    pub build_id: Vec<u8>,
}

/// Returns the link to shared debug information in a file; `None` if there is none.
#[must_use]
pub fn alt_of(image: &dyn Image, elf: &Elf) -> Option<AltLink> {
    let link = elf.section(".gnu_debugaltlink")?.read(image, MAX_LINK_BYTES).ok()?;
    let end = memchr::memchr(0, &link)?;
    let (path, build_id) = (PathBuf::from(OsStr::from_bytes(&link[..end])), link[end + 1..].to_vec());
    (end > 0 && !build_id.is_empty()).then_some(AltLink { path, build_id })
}
