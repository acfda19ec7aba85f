//! Why an ELF file cannot be used.

use std::io;

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
