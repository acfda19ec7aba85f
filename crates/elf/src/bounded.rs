//! Bounded reads of a file for the `object` crate: a limit per read, and a limit for all reads together.

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::rc::Rc;

use object::read::{ReadCache, ReadCacheOps, ReadRef};

use crate::{ElfError, Image, MAX_FILE_BYTES, MAX_PIECE_BYTES};

/// The pieces of one file that have been read. They stay in memory as long as this value. [`object`] reads through a
/// reference to it.
///
/// Whatever sizes a hostile file claims, no single allocation exceeds the piece limit, and their sum does not exceed
/// the file limit.
///
/// ```
/// use heapbpf_elf::{ElfFile, Pieces};
///
/// let program = std::fs::File::open("/proc/self/exe")?;
/// let pieces = Pieces::of(&program);
/// let file = ElfFile::parse(&pieces)?;
/// assert!(file.dynamic()?.needed.len() < 100);
/// # Ok::<(), heapbpf_elf::ElfError>(())
/// ```
pub struct Pieces<'i> {
    cache: ReadCache<Source<'i>>,
    left_bytes: Cell<u64>,
    piece_bytes: u64,
    error: LastError,
}

/// The last operating system error; [`object`] drops it.
type LastError = Rc<Cell<Option<io::Error>>>;

impl<'i> Pieces<'i> {
    /// Limits each piece to [`MAX_PIECE_BYTES`], and all of them together to [`MAX_FILE_BYTES`].
    pub fn of(image: &'i dyn Image) -> Self {
        Self::within(image, MAX_PIECE_BYTES, MAX_FILE_BYTES)
    }

    /// Limits each piece to `piece_bytes`, and all of them together to `file_bytes`. Reading a piece again counts
    /// again.
    pub fn within(image: &'i dyn Image, piece_bytes: u64, file_bytes: u64) -> Self {
        let error = LastError::default();
        let source = Source { image, at: 0, error: Rc::clone(&error) };
        Self { cache: ReadCache::new(source), left_bytes: Cell::new(file_bytes), piece_bytes, error }
    }

    /// Returns `error`, with the operating system's error filled in if a failed read caused it.
    pub(crate) fn explained(&self, error: ElfError) -> ElfError {
        match (error, self.error.take()) {
            (ElfError::Io(_), Some(cause)) => ElfError::Io(cause),
            (ElfError::Table { what, .. }, Some(cause)) => ElfError::Table { what, error: cause },
            (error, _) => error,
        }
    }

    fn spend(&self, bytes: u64) -> Result<(), ()> {
        let left_bytes = self.left_bytes.get().checked_sub(bytes).filter(|_| bytes <= self.piece_bytes).ok_or(())?;
        self.left_bytes.set(left_bytes);
        Ok(())
    }
}

impl<'p> ReadRef<'p> for &'p Pieces<'_> {
    fn len(self) -> Result<u64, ()> {
        self.cache.len()
    }

    fn read_bytes_at(self, offset: u64, size: u64) -> Result<&'p [u8], ()> {
        self.spend(size)?;
        self.cache.read_bytes_at(offset, size)
    }

    fn read_bytes_at_until(self, range: Range<u64>, delimiter: u8) -> Result<&'p [u8], ()> {
        // The cache searches at most 4 KiB for the end of a string.
        self.spend(range.end.saturating_sub(range.start).min(4096))?;
        self.cache.read_bytes_at_until(range, delimiter)
    }
}

/// An image with a read position, as [`ReadCache`] requires.
struct Source<'i> {
    image: &'i dyn Image,
    at: u64,
    error: LastError,
}

impl Source<'_> {
    fn keep_error<T>(&self, result: io::Result<T>) -> Result<T, ()> {
        result.map_err(|error| self.error.set(Some(error)))
    }
}

impl ReadCacheOps for Source<'_> {
    fn len(&mut self) -> Result<u64, ()> {
        self.keep_error(self.image.length_bytes())
    }

    fn seek(&mut self, position: u64) -> Result<u64, ()> {
        self.at = position;
        Ok(position)
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, ()> {
        let left_bytes = self.keep_error(self.image.length_bytes())?.saturating_sub(self.at);
        let length = buffer.len().min(usize::try_from(left_bytes).unwrap_or(usize::MAX));
        self.read_exact(&mut buffer[..length])?;
        Ok(length)
    }

    fn read_exact(&mut self, buffer: &mut [u8]) -> Result<(), ()> {
        self.keep_error(self.image.read_at(self.at, buffer))?;
        self.at = self.at.saturating_add(buffer.len() as u64);
        Ok(())
    }
}
