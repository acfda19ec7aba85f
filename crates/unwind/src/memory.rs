//! Memory of the unwound thread: the trait that a walk reads words through, and a copied stack as such memory.

use sampler_ebpf::abi::LARGEST_STACK_BYTES;

/// Why a word is not available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// It belongs to the stack that is walked, but lies above the part that is available.
    Above,
    /// It belongs to something else: it lies below the stack pointer, or on a different stack.
    Elsewhere,
}

/// Where a walk reads the words of a stack: a copy of it ([`StackMemory`]), a core file, another process.
pub trait Memory {
    /// The 64-bit little-endian word at `address`, which need not be aligned.
    ///
    /// # Errors
    /// [`Missing`] if it is not available.
    fn read(&mut self, address: u64) -> Result<u64, Missing>;
}

/// A copy of the top of a stack. Notes every word that is read, so that the result of a walk can be cached.
pub struct StackMemory<'a> {
    base: u64,
    bytes: &'a [u8],
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
}

impl Reads {
    /// Forgets everything, keeping the capacity.
    pub fn clear(&mut self) {
        self.offsets.clear();
        self.values.clear();
        self.missed = false;
    }
}

impl<'a> StackMemory<'a> {
    /// The stack whose word at address `base`, the stack pointer, is the first of `bytes`. Reads are noted in `reads`,
    /// which is cleared first.
    pub fn new(base: u64, bytes: &'a [u8], reads: &'a mut Reads) -> Self {
        reads.clear();
        Self { base, bytes, reads }
    }
}

impl Memory for StackMemory<'_> {
    fn read(&mut self, address: u64) -> Result<u64, Missing> {
        let distance = address.wrapping_sub(self.base);
        if let Ok(offset) = u32::try_from(distance)
            && let Some(value) = word(self.bytes, offset)
        {
            self.reads.offsets.push(offset);
            self.reads.values.push(value);
            return Ok(value);
        }
        self.reads.missed = true;
        if address >= self.base && distance < LARGEST_STACK_BYTES {
            Err(Missing::Above)
        } else {
            Err(Missing::Elsewhere)
        }
    }
}

/// The word at `offset` of `bytes`, if it lies within them.
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
        let mut reads = Reads { offsets: vec![99], values: vec![99], missed: true };
        let mut memory = StackMemory::new(BASE, &bytes, &mut reads);
        assert_eq!(memory.read(BASE + 8), Ok(0x0f0e_0d0c_0b0a_0908));
        assert_eq!(memory.read(BASE + 1), Ok(0x0807_0605_0403_0201), "unaligned");
        assert_eq!((reads.offsets, reads.values), (vec![8, 1], vec![0x0f0e_0d0c_0b0a_0908, 0x0807_0605_0403_0201]));
        assert!(!reads.missed);
    }

    #[test]
    fn missing_words_say_where_they_would_be() {
        let mut reads = Reads::default();
        let mut memory = StackMemory::new(BASE, &[0; 16], &mut reads);
        assert_eq!(memory.read(BASE + 9), Err(Missing::Above), "only seven bytes are left");
        assert_eq!(memory.read(BASE + LARGEST_STACK_BYTES - 1), Err(Missing::Above));
        assert_eq!(memory.read(BASE + LARGEST_STACK_BYTES), Err(Missing::Elsewhere));
        assert_eq!(memory.read(BASE - 8), Err(Missing::Elsewhere));
        assert_eq!(memory.read(0), Err(Missing::Elsewhere));
        assert!(reads.missed && reads.offsets.is_empty());
    }
}
