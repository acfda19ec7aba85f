//! Random access to the bytes of a file (the trait [`Image`]) and to a process's memory ([`Memory`]), and why an ELF file
//! cannot be used.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The bytes of a file. A file is read with `pread`, never mapped: if its owner truncates it, a read fails, whereas
/// access to a memory mapping would raise SIGBUS.
pub trait Image: Send + Sync {
    /// Current length, bytes.
    ///
    /// # Errors
    /// The error of the operating system.
    fn length_bytes(&self) -> io::Result<u64>;

    /// Fills `buffer` from file offset `offset`.
    ///
    /// # Errors
    /// `UnexpectedEof` if the file is too short, else the error of the operating system.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
}

impl Image for File {
    fn length_bytes(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(buffer, offset)
    }
}

impl Image for [u8] {
    fn length_bytes(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let source = usize::try_from(offset)
            .ok()
            .and_then(|start| self.get(start..)?.get(..buffer.len()))
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(source);
        Ok(())
    }
}

impl Image for Vec<u8> {
    fn length_bytes(&self) -> io::Result<u64> {
        self.as_slice().length_bytes()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.as_slice().read_at(offset, buffer)
    }
}

impl<I: Image + ?Sized> Image for &I {
    fn length_bytes(&self) -> io::Result<u64> {
        (**self).length_bytes()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        (**self).read_at(offset, buffer)
    }
}

/// Reads `bytes` bytes at `offset`, at most `limit` of them. `what` names them in the error.
///
/// # Errors
/// [`ElfError::TooLarge`] if they exceed the limit, [`ElfError::Io`] if they are not in the file or cannot be read.
pub fn read_range(image: &dyn Image, what: &str, offset: u64, bytes: u64, limit: u64) -> Result<Vec<u8>, ElfError> {
    if bytes > limit {
        return Err(ElfError::TooLarge { what: what.into(), bytes, limit });
    }
    // The length is checked first, so that a false size does not cause an allocation.
    let within = offset.checked_add(bytes).is_some_and(|end| image.length_bytes().is_ok_and(|length| end <= length));
    if !within {
        return Err(ElfError::Io(io::ErrorKind::UnexpectedEof.into()));
    }
    let mut buffer = vec![0; usize::try_from(bytes).map_err(|_| ElfError::Malformed("size"))?];
    image.read_at(offset, &mut buffer)?;
    Ok(buffer)
}

/// The memory of a process.
pub trait Memory {
    /// Fills `buffer` from `address`. Returns `false` if not all of it can be read.
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool;
}

/// Why an ELF file, or a part of it, cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ElfError {
    /// The file cannot be read, or is shorter than its headers claim.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// A header table cannot be read, or lies past the end of the file.
    #[error("{error}")]
    Table {
        /// Which table.
        what: &'static str,
        /// The read error.
        #[source]
        error: io::Error,
    },
    /// The file is not an ELF file.
    #[error("not a 64-bit little-endian ELF file")]
    NotElf,
    /// The file is a 32-bit or a big-endian ELF file.
    #[error("not a 64-bit little-endian ELF file")]
    NotSixtyFourBit,
    /// The file is malformed; the text says which part.
    #[error("malformed ELF file: {0}")]
    Malformed(&'static str),
    /// Something exceeds its limit.
    #[error("{what} has {bytes} bytes, more than the {limit} that are allowed")]
    TooLarge {
        /// What is too large.
        what: String,
        /// Its size, bytes.
        bytes: u64,
        /// The limit, bytes.
        limit: u64,
    },
}
