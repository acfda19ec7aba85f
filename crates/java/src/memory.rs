//! Reads process memory in bounded pieces, and numbers in HotSpot's UNSIGNED5 format: one byte for small numbers, and up
//! to five for others. Why memory, or a JVM, cannot be read.

use heapbpf_elf::{Memory, escaped};

/// Why a part of a JVM could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The memory is not mapped, or the process has ended.
    #[error("the memory cannot be read")]
    Unreadable,
    /// The data is inconsistent.
    #[error("it is not what it should be")]
    Malformed,
}

/// Reads `count` bytes at `address`.
pub(crate) fn bytes(memory: &dyn Memory, address: u64, count: usize) -> Result<Vec<u8>, ReadError> {
    let mut bytes = vec![0; count];
    if memory.read(address, &mut bytes) { Ok(bytes) } else { Err(ReadError::Unreadable) }
}

/// Reads the word at `address`.
pub(crate) fn word(memory: &dyn Memory, address: u64) -> Result<u64, ReadError> {
    let mut bytes = [0; 8];
    if memory.read(address, &mut bytes) { Ok(u64::from_le_bytes(bytes)) } else { Err(ReadError::Unreadable) }
}

/// Reads the 32-bit number at `address`.
pub(crate) fn int(memory: &dyn Memory, address: u64) -> Result<u32, ReadError> {
    let mut bytes = [0; 4];
    if memory.read(address, &mut bytes) { Ok(u32::from_le_bytes(bytes)) } else { Err(ReadError::Unreadable) }
}

/// Reads a zero-terminated string, up to `most` bytes of it. Escapes bytes that are not UTF-8.
pub(crate) fn text(memory: &dyn Memory, address: u64, most: usize) -> Result<String, ReadError> {
    const PIECE: u64 = 64;
    let mut text = Vec::new();
    while text.len() < most {
        // Reads up to a piece boundary, so that the page after the end of the string is not needed.
        let at = address.wrapping_add(text.len() as u64);
        let piece = bytes(memory, at, (PIECE - at % PIECE) as usize)?;
        let end = piece.iter().position(|byte| *byte == 0);
        text.extend_from_slice(&piece[..end.unwrap_or(piece.len())]);
        if end.is_some() {
            break;
        }
    }
    text.truncate(most);
    Ok(escaped(&text))
}

/// The fields of a structure that was read in one piece.
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl Fields<'_> {
    fn at<const N: usize>(&self, offset: u32) -> Result<[u8; N], ReadError> {
        let found = self.0.get(offset as usize..).and_then(|bytes| bytes.first_chunk());
        found.copied().ok_or(ReadError::Malformed)
    }

    pub(crate) fn u64(&self, offset: u32) -> Result<u64, ReadError> {
        self.at(offset).map(u64::from_le_bytes)
    }

    pub(crate) fn u32(&self, offset: u32) -> Result<u32, ReadError> {
        self.at(offset).map(u32::from_le_bytes)
    }

    pub(crate) fn u16(&self, offset: u32) -> Result<u16, ReadError> {
        self.at(offset).map(u16::from_le_bytes)
    }
}

/// Returns a hash of the words (FNV-1a). Different words almost certainly have different hashes.
pub(crate) fn digest(words: &[u64]) -> u64 {
    let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    words.iter().flat_map(|word| word.to_le_bytes()).fold(0xcbf2_9ce4_8422_2325, mix)
}

/// Why the Java frames of a JVM cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsupported {
    /// It does not describe itself; OpenJ9, for example, does not.
    #[error("it is not HotSpot, or a HotSpot without its description (gHotSpotVMStructs)")]
    NotHotSpot,
    /// The frames of this version are not known.
    #[error("the frames of Java {0} are not known (those of 17 to 22 and 25 are)")]
    Version(u32),
    /// Its description lacks something.
    #[error("its description lacks {0}")]
    Lacks(&'static str),
    /// Its description is inconsistent.
    #[error("its description of {0} is not understood")]
    Malformed(&'static str),
    /// Its memory cannot be read.
    #[error("its memory cannot be read")]
    Unreadable,
    /// Reading its memory took too long.
    #[error("reading its memory took too long")]
    NoAnswer,
    /// It has not created its code heaps yet.
    #[error("it has not begun")]
    NotReady,
    /// The instruction set is not x86-64.
    #[error("Java frames are read on x86-64 only")]
    Machine,
}

impl From<ReadError> for Unsupported {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Unreadable => Self::Unreadable,
            ReadError::Malformed => Self::Malformed("code heaps"),
        }
    }
}

/// A stream of numbers.
pub(crate) struct Stream<'a> {
    bytes: &'a [u8],
    /// 1 if no byte is zero, as in version 20 and later.
    base: u32,
}

impl<'a> Stream<'a> {
    pub(crate) fn new(bytes: &'a [u8], without_zeros: bool) -> Self {
        Self { bytes, base: without_zeros.into() }
    }

    pub(crate) fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.bytes.split_first()?;
        self.bytes = rest;
        Some(*first)
    }

    /// Reads the next number.
    pub(crate) fn number(&mut self) -> Option<u32> {
        // From this value on, another byte follows.
        const FIRST_HIGH: u8 = 192;
        let mut number = 0u32;
        for shift in [0, 6, 12, 18, 24] {
            let byte = self.byte()?;
            let digit = u32::from(byte).checked_sub(self.base)?;
            number = number.wrapping_add(digit << shift);
            if byte < FIRST_HIGH {
                break;
            }
        }
        Some(number)
    }

    /// Reads the next signed number, whose sign is in the lowest bit.
    pub(crate) fn signed(&mut self) -> Option<i32> {
        let number = self.number()?;
        Some((number >> 1).cast_signed() ^ -(number & 1).cast_signed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Sparse;

    #[test]
    fn texts_end_where_they_end_and_are_escaped() {
        let mut memory = Sparse::default();
        memory.put(0x1000, b"nmethod\0rest");
        memory.put(0x10fc, b"ab\xff");
        memory.put(0x2000, &[b'x'; 0x200]);
        assert_eq!(text(&memory, 0x1000, 64).as_deref(), Ok("nmethod"));
        assert_eq!(text(&memory, 0x10fc, 64).as_deref(), Ok("ab\\xff"), "the page's end is the end of what is read");
        assert_eq!(text(&memory, 0x2000, 100).map(|text| text.len()), Ok(100));
        assert_eq!(text(&memory, 0x9000, 64), Err(ReadError::Unreadable));
        assert_eq!(text(&memory, u64::MAX, 64), Err(ReadError::Unreadable));
    }

    #[test]
    fn fields_outside_of_what_was_read_are_none() {
        let fields = Fields(&[1, 0, 0, 0, 0, 0, 0, 0, 9]);
        assert_eq!((fields.u64(0), fields.u32(0), fields.u16(7)), (Ok(1), Ok(1), Ok(0x900)));
        assert_eq!(fields.u64(2), Err(ReadError::Malformed));
        assert!(fields.u16(u32::MAX).is_err());
        assert_ne!(digest(&[1, 2]), digest(&[2, 1]));
    }

    #[test]
    fn numbers_are_read_as_each_version_writes_them() {
        let of = |bytes: &[u8], without_zeros| Stream::new(bytes, without_zeros).number();
        assert_eq!([of(&[0], false), of(&[191], false), of(&[192, 0], false)], [0, 191, 192].map(Some));
        assert_eq!([of(&[1], true), of(&[191], true), of(&[192, 1], true)], [0, 190, 191].map(Some));
        // Five bytes at most, of 6 bits each, and what does not fit is dropped.
        let largest = 255_u32.wrapping_mul(1 + (1 << 6) + (1 << 12) + (1 << 18) + (1 << 24));
        assert_eq!(of(&[255, 255, 255, 255, 255, 7], false), Some(largest));
        assert_eq!([of(&[], false), of(&[192], false), of(&[0], true)], [None; 3]);
        let signed = |bytes: &[u8]| Stream::new(bytes, false).signed();
        assert_eq!([signed(&[0]), signed(&[1]), signed(&[2]), signed(&[3])], [0, -1, 1, -2].map(Some));
    }
}
