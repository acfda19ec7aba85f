//! Memory of the unwound thread: the trait through which a walk reads words, and its implementation for a copied stack.

use sampler_ebpf::abi::LARGEST_STACK_BYTES;

/// Why a word is not available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// It belongs to the stack that is walked, but lies above the part that is available.
    Above,
    /// It belongs to something else: it lies below the stack pointer, or on a different stack.
    Elsewhere,
}

/// The memory from which a walk reads the words of a stack: a copy of it ([`StackMemory`]), a core file, another
/// process.
pub trait Memory {
    /// Reads the 64-bit little-endian word at `address`, which need not be aligned.
    ///
    /// # Errors
    /// [`Missing`] if it is not available.
    fn read(&mut self, address: u64) -> Result<u64, Missing>;
}

/// A copy of a stack from the stack pointer up: the part next to the stack pointer, and the pieces above it that walks
/// need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StackCopy<'a> {
    /// The bytes from the stack pointer up, without a gap.
    pub bytes: &'a [u8],
    /// The pieces that were copied above that, in order of offset.
    pub pieces: &'a [Piece<'a>],
}

/// A piece of a stack copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece<'a> {
    /// Distance of its first byte from the stack pointer.
    pub offset: u32,
    /// Its bytes.
    pub bytes: &'a [u8],
}

impl<'a> From<&'a [u8]> for StackCopy<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self { bytes, pieces: &[] }
    }
}

impl StackCopy<'_> {
    /// Distance of its end from the stack pointer.
    pub fn end(&self) -> u64 {
        let ends = self.pieces.iter().map(|piece| u64::from(piece.offset) + piece.bytes.len() as u64);
        ends.fold(self.bytes.len() as u64, u64::max)
    }

    /// Returns the word at `offset`, if it lies within one piece.
    pub fn word(&self, offset: u32) -> Option<u64> {
        word(self.bytes, offset)
            .or_else(|| self.pieces.iter().find_map(|piece| word(piece.bytes, offset.checked_sub(piece.offset)?)))
    }
}

/// A stack copy as [`Memory`]. Records every word that is read, so that the result of a walk can be cached.
pub struct StackMemory<'a> {
    base: u64,
    copy: StackCopy<'a>,
    reads: &'a mut Reads,
}

/// The words that a walk has read, as parallel lists.
#[derive(Clone, Debug, Default)]
pub struct Reads {
    /// Offsets into the copy, bytes.
    pub offsets: Vec<u32>,
    /// The words at these offsets.
    pub values: Vec<u64>,
    /// Whether a read failed, so that the result depends on the length of the copy, too.
    pub missed: bool,
    /// Whether a word was requested that lies between the pieces of the copy, so that the result does not match the
    /// stack.
    pub left_out: bool,
}

impl Reads {
    /// Clears everything, but keeps the capacity.
    pub fn clear(&mut self) {
        self.offsets.clear();
        self.values.clear();
        self.missed = false;
        self.left_out = false;
    }
}

impl<'a> StackMemory<'a> {
    /// Creates the memory of a stack whose first copied word is at address `base`, the stack pointer. Records reads in
    /// `reads`, which is cleared first.
    pub fn new(base: u64, copy: StackCopy<'a>, reads: &'a mut Reads) -> Self {
        reads.clear();
        Self { base, copy, reads }
    }
}

impl Memory for StackMemory<'_> {
    fn read(&mut self, address: u64) -> Result<u64, Missing> {
        let distance = address.wrapping_sub(self.base);
        if let Ok(offset) = u32::try_from(distance)
            && let Some(value) = self.copy.word(offset)
        {
            self.reads.offsets.push(offset);
            self.reads.values.push(value);
            return Ok(value);
        }
        self.reads.missed = true;
        self.reads.left_out |= !self.copy.pieces.is_empty() && distance < self.copy.end();
        if address >= self.base && distance < LARGEST_STACK_BYTES {
            Err(Missing::Above)
        } else {
            Err(Missing::Elsewhere)
        }
    }
}

/// Returns the word at `offset` of `bytes`, if it lies within them.
pub fn word(bytes: &[u8], offset: u32) -> Option<u64> {
    let word = bytes.get(offset as usize..)?.first_chunk()?;
    Some(u64::from_le_bytes(*word))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = 0x7fff_0000_1000;

    #[test]
    fn reads_are_noted_with_their_values() {
        let bytes: Vec<u8> = (0..24).collect();
        let mut reads = Reads { offsets: vec![99], values: vec![99], missed: true, left_out: true };
        let mut memory = StackMemory::new(BASE, bytes.as_slice().into(), &mut reads);
        assert_eq!(memory.read(BASE + 8), Ok(0x0f0e_0d0c_0b0a_0908));
        assert_eq!(memory.read(BASE + 1), Ok(0x0807_0605_0403_0201), "unaligned");
        assert_eq!((reads.offsets, reads.values), (vec![8, 1], vec![0x0f0e_0d0c_0b0a_0908, 0x0807_0605_0403_0201]));
        assert!(!reads.missed && !reads.left_out);
    }

    #[test]
    fn words_between_pieces_are_left_out() {
        let bytes: Vec<u8> = (0..24).collect();
        let pieces = [Piece { offset: 100, bytes: &bytes }, Piece { offset: 1000, bytes: &bytes[..8] }];
        let copy = StackCopy { bytes: &bytes[..16], pieces: &pieces };
        assert_eq!((copy.end(), StackCopy::from(&bytes[..]).end(), StackCopy::default().end()), (1008, 24, 0));
        let read = |offset| {
            let mut reads = Reads::default();
            let read = StackMemory::new(BASE, copy, &mut reads).read(BASE + offset);
            assert_eq!(reads.missed, read.is_err());
            (read.ok(), reads.left_out)
        };
        let word = |at: usize| Some(u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()));
        for (offset, at) in [(0, 0), (8, 8), (100, 0), (116, 16), (1000, 0)] {
            assert_eq!(read(offset), (word(at), false), "{offset}");
        }
        for between in [9, 15, 16, 99, 117, 500, 999, 1001, 1007] {
            assert_eq!(read(between), (None, true), "{between}");
        }
        assert_eq!(read(1008), (None, false), "above the copy");
    }

    #[test]
    fn missing_words_say_where_they_would_be() {
        let mut reads = Reads::default();
        let mut memory = StackMemory::new(BASE, [0; 16].as_slice().into(), &mut reads);
        assert_eq!(memory.read(BASE + 9), Err(Missing::Above), "only seven bytes are left");
        assert_eq!(memory.read(BASE + LARGEST_STACK_BYTES - 1), Err(Missing::Above));
        assert_eq!(memory.read(BASE + LARGEST_STACK_BYTES), Err(Missing::Elsewhere));
        assert_eq!(memory.read(BASE - 8), Err(Missing::Elsewhere));
        assert_eq!(memory.read(0), Err(Missing::Elsewhere));
        assert!(reads.missed && reads.offsets.is_empty());
    }
}
