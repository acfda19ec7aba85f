//! The copied stack as memory, with a record of every word that was looked at.

/// Why a word of the stack is not to be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// It lies above the copy, near enough to be of the same stack.
    Above,
    /// It lies below the stack pointer, or on a different stack.
    Elsewhere,
}

/// Distance above the copy that still counts as the same stack, bytes: the kernel side's limit for a plausible stack.
const SAME_STACK_BYTES: u64 = 64 << 20;

/// A copy of the top of a stack.
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
    /// What was there.
    pub values: Vec<u64>,
    /// Whether a read failed, so that the result depends on the length of the copy, too.
    pub missed: bool,
}

impl Reads {
    /// Forgets everything, keeping the room.
    pub fn clear(&mut self) {
        self.offsets.clear();
        self.values.clear();
        self.missed = false;
    }
}

impl<'a> StackMemory<'a> {
    /// Memory that begins at address `base` and is noted in `reads`.
    pub fn new(base: u64, bytes: &'a [u8], reads: &'a mut Reads) -> Self {
        reads.clear();
        Self { base, bytes, reads }
    }

    /// The word at `address`.
    ///
    /// # Errors
    /// [`Missing`] if it is not in the copy.
    pub fn read(&mut self, address: u64) -> Result<u64, Missing> {
        let distance = address.wrapping_sub(self.base);
        if let Ok(offset) = u32::try_from(distance)
            && let Some(value) = word(self.bytes, offset)
        {
            self.reads.offsets.push(offset);
            self.reads.values.push(value);
            return Ok(value);
        }
        self.reads.missed = true;
        if address >= self.base && distance < SAME_STACK_BYTES { Err(Missing::Above) } else { Err(Missing::Elsewhere) }
    }
}

/// The word at `offset` of `bytes`.
pub fn word(bytes: &[u8], offset: u32) -> Option<u64> {
    let word = bytes.get(offset as usize..)?.first_chunk()?;
    Some(u64::from_le_bytes(*word))
}
