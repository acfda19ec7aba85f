//! Reading files that may be hostile: in bounded pieces, and not too many of them; function bounds from unwind tables.

use std::cell::Cell;
use std::io::{Read, Seek, SeekFrom};

use object::read::{ReadCache, ReadRef};

/// Largest single read from a file (a section, a header table).
const READ_MAX_BYTES: u64 = 256 << 20;

/// Most bytes that are kept of one file at a time: its sections may claim to be the same bytes many times over.
const FILE_MAX_BYTES: u64 = 1 << 30;

/// What has been read of one file.
#[derive(Debug)]
pub(super) struct Pieces<R: Read + Seek> {
    cache: ReadCache<R>,
    left_bytes: Cell<u64>,
}

impl<R: Read + Seek> Pieces<R> {
    pub(super) fn of(reader: R) -> Self {
        Self { cache: ReadCache::new(reader), left_bytes: Cell::new(FILE_MAX_BYTES) }
    }

    pub(super) fn bounded(&self) -> Bounded<'_, R> {
        Bounded(self)
    }

    /// Lets go of all of it.
    pub(super) fn into_inner(self) -> R {
        self.cache.into_inner()
    }
}

/// A piece of a file that is kept by who asks for it alone.
pub(super) fn read_once<R: Read + Seek>(reader: &mut R, offset: u64, size: u64) -> Option<Vec<u8>> {
    let file_bytes = reader.seek(SeekFrom::End(0)).ok()?;
    if size > READ_MAX_BYTES || offset.checked_add(size)? > file_bytes {
        return None;
    }
    let mut bytes = vec![0; usize::try_from(size).ok()?];
    reader.seek(SeekFrom::Start(offset)).ok()?;
    reader.read_exact(&mut bytes).ok()?;
    Some(bytes)
}

/// A reader of bounded pieces: a size field of a hostile file never becomes an allocation beyond [`READ_MAX_BYTES`], all of
/// them together none beyond [`FILE_MAX_BYTES`].
#[derive(Debug)]
pub(super) struct Bounded<'a, R: Read + Seek>(&'a Pieces<R>);

impl<R: Read + Seek> Clone for Bounded<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<R: Read + Seek> Copy for Bounded<'_, R> {}

impl<'a, R: Read + Seek> ReadRef<'a> for Bounded<'a, R> {
    fn len(self) -> Result<u64, ()> {
        self.0.cache.len()
    }
    fn read_bytes_at(self, offset: u64, size: u64) -> Result<&'a [u8], ()> {
        let left_bytes = self.0.left_bytes.get().checked_sub(size).filter(|_| size <= READ_MAX_BYTES).ok_or(())?;
        self.0.left_bytes.set(left_bytes);
        self.0.cache.read_bytes_at(offset, size)
    }
    fn read_bytes_at_until(self, range: std::ops::Range<u64>, delimiter: u8) -> Result<&'a [u8], ()> {
        self.0.cache.read_bytes_at_until(range, delimiter)
    }
}

/// Start and end of every function that an `.eh_frame` section at `address` describes, sorted.
pub(super) fn function_bounds(address: u64, bytes: &[u8]) -> Vec<(u64, u64)> {
    use gimli::UnwindSection as _;
    let section = gimli::EhFrame::new(bytes, gimli::LittleEndian);
    let bases = gimli::BaseAddresses::default().set_eh_frame(address);
    let mut entries = section.entries(&bases);
    let mut bounds = Vec::new();
    while let Ok(Some(entry)) = entries.next() {
        let gimli::CieOrFde::Fde(partial) = entry else {
            continue;
        };
        let Ok(fde) = partial.parse(gimli::EhFrame::cie_from_offset) else {
            continue;
        };
        let start = fde.initial_address();
        if let Some(end) = start.checked_add(fde.len()) {
            bounds.push((start, end));
        }
    }
    bounds.sort_unstable();
    bounds
}
