//! Code objects in the memory of a process.

use sampler_ebpf::abi::{PYTHON_IDENTITY_BYTES, PythonCodeRecord, PythonCopy, check};

use crate::layout::Layout;
use crate::lines;

/// The memory of a process.
pub trait Memory {
    /// Fills the buffer from an address. Returns whether all of it could be read.
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool;

    /// Fills as much of the beginning of the buffer as is available. Returns the number of bytes.
    fn read_beginning(&self, address: u64, buffer: &mut [u8]) -> usize {
        if self.read(address, buffer) { buffer.len() } else { 0 }
    }
}

/// The parts of a code object that the BPF programs copied.
impl Memory for PythonCodeRecord {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        self.read_beginning(address, buffer) == buffer.len()
    }

    fn read_beginning(&self, address: u64, buffer: &mut [u8]) -> usize {
        let parts = [part(&self.head), part(&self.name), part(&self.file), part(&self.lines)];
        let of = |(start, bytes): (u64, &[u8])| {
            let from = usize::try_from(address.checked_sub(start)?).ok()?;
            let there = bytes.get(from..)?;
            let count = there.len().min(buffer.len());
            buffer[..count].copy_from_slice(&there[..count]);
            Some(count)
        };
        parts.into_iter().filter_map(of).max().unwrap_or(0)
    }
}

/// Maximum number of characters of a name or path. Longer ones are truncated.
const MOST_CHARACTERS: usize = 1024;
/// Largest line table that is read, bytes.
const MOST_LINE_BYTES: u64 = 1 << 20;

/// The character kind, and the flags of ordinary strings, in the state field of a string.
const KIND_SHIFT: u32 = 2;
const IS_COMPACT: u32 = 1 << 5;
const IS_ASCII: u32 = 1 << 6;

/// Returns the copied bytes and their address.
fn part<const BYTES: usize>(copy: &PythonCopy<BYTES>) -> (u64, &[u8]) {
    let copied = if copy.status == 0 { BYTES.min(copy.asked as usize) } else { 0 };
    (copy.address, &copy.bytes[..copied])
}

/// Why a code object could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodeError {
    /// Its memory, or that of its names, cannot be read.
    #[error("its memory cannot be read")]
    Unreadable,
    /// There is now something else at its address.
    #[error("something else is at its address by now")]
    Replaced,
    /// The objects that it refers to are not strings.
    #[error("it is not a code object")]
    Malformed,
}

/// The contents of a code object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Code {
    /// Name of the function, qualified by the functions and classes that contain it if the version supports that.
    pub name: String,
    /// Path of its file at compile time.
    pub file: String,
    /// Its first line.
    pub first_line: u32,
    /// Index of the first instruction that counts as part of the function.
    pub first_traceable: u32,
    /// Whether only the beginning of its name, path or lines could be read.
    pub is_cut: bool,
    lines: Box<[u8]>,
}

impl Code {
    /// Reads the code object at an address. `expected`: its checksum, as computed by the kernel side.
    ///
    /// # Errors
    /// [`CodeError`], also if there is now a different object at the address.
    pub fn read(memory: &dyn Memory, layout: &Layout, address: u64, expected: u64) -> Result<Self, CodeError> {
        let at = layout.code;
        let mut head = vec![0; layout.head_bytes()];
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
        let mut is_cut = false;
        let (name, type_of_name) = text(memory, layout, word(at.name as usize)?, &mut is_cut)?;
        let (file, type_of_file) = text(memory, layout, word(at.file as usize)?, &mut is_cut)?;
        if type_of_name != type_of_file {
            return Err(CodeError::Malformed);
        }
        let code = Self {
            name,
            file,
            first_line,
            first_traceable: at.first_traceable.and_then(|place| int(&head, place as usize)).unwrap_or(0),
            lines: bytes(memory, word(at.lines as usize)?, &mut is_cut)?,
            is_cut,
        };
        // Meanwhile the object may have been freed and its memory reused.
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

    /// Returns the line of the instruction at an offset in bytes.
    #[must_use]
    pub fn line(&self, layout: &Layout, offset: u32) -> Option<u32> {
        lines::line(layout.code.format, &self.lines, self.first_line, offset)
    }

    /// Drops its line table, which may be long. Its lines are unknown from now on.
    pub fn forget_lines(&mut self) {
        (self.first_line, self.lines) = (0, Box::default());
    }

    /// Memory that it uses, bytes.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.name.len() + self.file.len() + self.lines.len()
    }
}

/// Whether an object has references, according to its first word. A freed one has none, or has a pointer of the
/// allocator there.
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

/// Reads a string object. Also returns the address of its type. Sets `is_cut` if only its beginning could be read.
/// Names and paths contain no zeros: the interpreter rejects them, and memory that is not a string contains many.
fn text(memory: &dyn Memory, layout: &Layout, address: u64, is_cut: &mut bool) -> Result<(String, u64), CodeError> {
    let mut head = [0; 40];
    if !memory.read(address, &mut head) {
        return Err(CodeError::Unreadable);
    }
    let (Some(of_type), Some(length), Some(state)) = (long(&head, 8), long(&head, 16), int(&head, 32)) else {
        return Err(CodeError::Malformed);
    };
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
    fill(memory, address.wrapping_add(u64::from(head)), &mut data, is_cut)?;
    let character = |bytes: &[u8]| {
        let number = bytes.iter().rev().fold(0u32, |number, byte| number << 8 | u32::from(*byte));
        char::from_u32(number).unwrap_or(char::REPLACEMENT_CHARACTER)
    };
    let text: String = data.chunks_exact(width).map(character).collect();
    if text.contains('\0') { Err(CodeError::Malformed) } else { Ok((text, of_type)) }
}

/// Fills `data`, and truncates it to the bytes that could be read.
fn fill(memory: &dyn Memory, address: u64, data: &mut Vec<u8>, is_cut: &mut bool) -> Result<(), CodeError> {
    let there = memory.read_beginning(address, data);
    if there == 0 && !data.is_empty() {
        return Err(CodeError::Unreadable);
    }
    *is_cut |= there < data.len();
    data.truncate(there);
    Ok(())
}

/// Reads a bytes object. Sets `is_cut` if only its beginning could be read.
fn bytes(memory: &dyn Memory, address: u64, is_cut: &mut bool) -> Result<Box<[u8]>, CodeError> {
    let mut size = [0; 8];
    if !memory.read(address.wrapping_add(16), &mut size) {
        return Err(CodeError::Unreadable);
    }
    let size = u64::from_le_bytes(size);
    if size > MOST_LINE_BYTES {
        return Err(CodeError::Malformed);
    }
    let mut data = vec![0; size as usize];
    fill(memory, address.wrapping_add(32), &mut data, is_cut)?;
    Ok(data.into())
}

#[cfg(test)]
#[path = "code_tests.rs"]
pub(crate) mod tests;
