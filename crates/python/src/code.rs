//! Code objects in the memory of a process.

use sampler_ebpf::abi::{PYTHON_IDENTITY_BYTES, check};

use crate::layout::Layout;
use crate::lines;

/// The memory of a process.
pub trait Memory {
    /// Fills the buffer from an address; returns whether all of it could be read.
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool;
}

/// Most bytes of a code object that are read: its head, up to the instructions.
const MOST_HEAD_BYTES: usize = 512;
/// Most characters of a name or path. What is longer is cut.
const MOST_CHARACTERS: usize = 1024;
/// Longest table of lines that is read, bytes.
const MOST_LINE_BYTES: u64 = 1 << 20;

/// Kind of characters, and the marks of usual strings, in the state of a string.
const KIND_SHIFT: u32 = 2;
const IS_COMPACT: u32 = 1 << 5;
const IS_ASCII: u32 = 1 << 6;

/// Why a code object could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodeError {
    /// Its memory, or that of its names, is not there.
    #[error("its memory cannot be read")]
    Unreadable,
    /// Something else is at its address by now.
    #[error("something else is at its address by now")]
    Replaced,
    /// What it refers to are no strings.
    #[error("it is not a code object")]
    Malformed,
}

/// What a code object says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Code {
    /// Name of the function, with those that it is in, where the version has it.
    pub name: String,
    /// Path of its file, as it was compiled.
    pub file: String,
    /// Its first line.
    pub first_line: u32,
    /// Index of the first instruction that counts as one of the function.
    pub first_traceable: u32,
    lines: Box<[u8]>,
}

impl Code {
    /// Reads the code object at an address. `expected`: the check that the kernel side computed of it.
    ///
    /// # Errors
    /// [`CodeError`], also if the object is not the one that was seen.
    pub fn read(memory: &dyn Memory, layout: &Layout, address: u64, expected: u64) -> Result<Self, CodeError> {
        let at = layout.code;
        let first_traceable = at.first_traceable.map_or(0, |place| place as usize + 4);
        let ends =
            [at.lines as usize + 8, layout.process.code_identity as usize + PYTHON_IDENTITY_BYTES, first_traceable];
        let mut head = vec![0; ends.into_iter().max().unwrap_or(0).min(MOST_HEAD_BYTES)];
        if !memory.read(address, &mut head) {
            return Err(CodeError::Unreadable);
        }
        let word = |place: usize| long(&head, place).ok_or(CodeError::Malformed);
        let first_line = int(&head, layout.process.code_first_line as usize).ok_or(CodeError::Malformed)?;
        let identity = layout.process.code_identity as usize;
        let identity = [word(identity)?, word(identity + 8)?, word(identity + 16)?, word(identity + 24)?];
        if !is_in_use(&head) || check(identity, first_line) != expected {
            return Err(CodeError::Replaced);
        }
        let code = Self {
            name: text(memory, layout, word(at.name as usize)?)?,
            file: text(memory, layout, word(at.file as usize)?)?,
            first_line,
            first_traceable: at.first_traceable.and_then(|place| int(&head, place as usize)).unwrap_or(0),
            lines: bytes(memory, word(at.lines as usize)?)?,
        };
        // While these were read, the object may have been freed and its memory used again.
        let mut again = vec![0; head.len()];
        if !memory.read(address, &mut again) {
            return Err(CodeError::Unreadable);
        }
        let identity = layout.process.code_identity as usize;
        let identity = identity..identity + PYTHON_IDENTITY_BYTES;
        if !is_in_use(&again) || head.get(identity.clone()) != again.get(identity) {
            return Err(CodeError::Replaced);
        }
        Ok(code)
    }

    /// The line of the instruction at an offset in bytes.
    #[must_use]
    pub fn line(&self, layout: &Layout, offset: u32) -> Option<u32> {
        lines::line(layout.code.format, &self.lines, self.first_line, offset)
    }

    /// Memory that it takes.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.name.len() + self.file.len() + self.lines.len()
    }
}

/// Whether an object has references, by its first word: a freed one has none, or the allocator's pointer is there.
fn is_in_use(object: &[u8]) -> bool {
    const OVERFLOW: u64 = 0xffff << 32;
    long(object, 0).is_some_and(|references| references as u32 != 0 && references & OVERFLOW == 0)
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

fn int(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// A string object.
fn text(memory: &dyn Memory, layout: &Layout, address: u64) -> Result<String, CodeError> {
    let mut head = [0; 40];
    if !memory.read(address, &mut head) {
        return Err(CodeError::Unreadable);
    }
    let (Some(length), Some(state)) = (long(&head, 16), int(&head, 32)) else { return Err(CodeError::Malformed) };
    if state & IS_COMPACT == 0 || length > i64::MAX.cast_unsigned() {
        return Err(CodeError::Malformed);
    }
    let is_ascii = state & IS_ASCII != 0;
    let width = match state >> KIND_SHIFT & 7 {
        1 => 1,
        2 if !is_ascii => 2,
        4 if !is_ascii => 4,
        _ => return Err(CodeError::Malformed),
    };
    let length = usize::try_from(length).unwrap_or(usize::MAX).min(MOST_CHARACTERS);
    let mut data = vec![0; length * width];
    let head = if is_ascii { layout.code.ascii_head } else { layout.code.compact_head };
    if !memory.read(address.wrapping_add(u64::from(head)), &mut data) {
        return Err(CodeError::Unreadable);
    }
    let character = |bytes: &[u8]| {
        let number = bytes.iter().rev().fold(0u32, |number, byte| number << 8 | u32::from(*byte));
        char::from_u32(number).unwrap_or(char::REPLACEMENT_CHARACTER)
    };
    Ok(data.chunks_exact(width).map(character).collect())
}

/// A bytes object.
fn bytes(memory: &dyn Memory, address: u64) -> Result<Box<[u8]>, CodeError> {
    let mut size = [0; 8];
    if !memory.read(address.wrapping_add(16), &mut size) {
        return Err(CodeError::Unreadable);
    }
    let size = u64::from_le_bytes(size);
    if size > MOST_LINE_BYTES {
        return Err(CodeError::Malformed);
    }
    let mut data = vec![0; size as usize];
    if !memory.read(address.wrapping_add(32), &mut data) {
        return Err(CodeError::Unreadable);
    }
    Ok(data.into())
}

#[cfg(test)]
#[path = "code_tests.rs"]
pub(crate) mod tests;
