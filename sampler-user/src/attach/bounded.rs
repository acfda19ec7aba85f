//! Reading files that may be hostile: in bounded pieces; function bounds from unwind tables.

use std::io::{Read, Seek};

use object::read::{ReadCache, ReadRef};

/// Largest single read from a file (a section, a header table).
const READ_MAX_BYTES: u64 = 256 << 20;

/// A reader of bounded pieces: a size field of a hostile file never becomes an allocation beyond [`READ_MAX_BYTES`].
#[derive(Debug)]
pub(super) struct Bounded<'a, R: Read + Seek>(pub(super) &'a ReadCache<R>);

impl<R: Read + Seek> Clone for Bounded<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<R: Read + Seek> Copy for Bounded<'_, R> {}

impl<'a, R: Read + Seek> ReadRef<'a> for Bounded<'a, R> {
    fn len(self) -> Result<u64, ()> {
        self.0.len()
    }
    fn read_bytes_at(self, offset: u64, size: u64) -> Result<&'a [u8], ()> {
        if size > READ_MAX_BYTES { Err(()) } else { self.0.read_bytes_at(offset, size) }
    }
    fn read_bytes_at_until(self, range: std::ops::Range<u64>, delimiter: u8) -> Result<&'a [u8], ()> {
        self.0.read_bytes_at_until(range, delimiter)
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
