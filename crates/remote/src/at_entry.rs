//! Makes a process that has just called exec wait at its entry point, while its dynamic loader is still at work.
//! Nothing has to trace or stop it, and it goes on by itself if its holder is killed.
//!
//! The loader has read the entry point by now. So the first instruction there becomes a short jump. It leads to a long
//! jump in the padding behind the entry code, which leads to the instructions that wait. These end by running the
//! replaced first instruction, and continue behind it.
//!
//! The process keeps running. Of the code that it may be about to execute, only one instruction changes, by one write
//! within an 8-byte word, so it executes either the old instruction or the new one. (A long jump would replace two or
//! three instructions: a process between them would find itself in the middle of the jump.) The startup code of C
//! libraries has such an instruction and such padding; nothing else is touched.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use crate::entry::{NotHeld, Pace, Vector, Waiting, write_code};
use crate::maps::PAGE_BYTES;
use crate::status::Status;

/// Time between two checks of a process that waits.
const PAUSE_NS: u64 = 100_000;
/// Bytes of the auxiliary vector that are read: it has some 20 pairs of words.
const VECTOR_BYTES: usize = 1024;
/// Bytes that are read from the entry point on, and the most that entry code has.
const CODE_BYTES: usize = 120;
const MOST_ENTRY_BYTES: usize = 64;
/// Whole instructions that entry code may begin with: `xor ebp, ebp`, `xor rbp, rbp`, `endbr64`.
const FIRST: [&[u8]; 3] = [&[0x31, 0xed], &[0x48, 0x31, 0xed], ENDBR];
const ENDBR: &[u8] = &[0xf3, 0x0f, 0x1e, 0xfa];
/// Bytes of a short jump and of a long one.
const SHORT_BYTES: usize = 2;
const LONG_BYTES: usize = 5;
/// C libraries' entry code ends with this, because nothing returns there.
const HLT: u8 = 0xf4;
const RET: u8 = 0xc3;
/// Functions begin at multiples of this.
const ALIGNMENT: u64 = 16;

impl Waiting {
    /// Makes a process that has just called exec wait when it reaches its entry point, for not much longer than
    /// `limit`. A process that has already passed its entry point is not affected:
    /// it never [is there](Waiting::is_there).
    ///
    /// # Errors
    /// The process does not wait, and runs as usual.
    pub fn at_entry_of(pid: u32, limit: Duration) -> Result<Self, NotHeld> {
        // Opened first, so that it belongs to the program that runs now.
        let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem")).map_err(gone)?;
        let mut bytes = [0; VECTOR_BYTES];
        let auxv = File::open(format!("/proc/{pid}/auxv")).map_err(gone)?;
        let length = auxv.read_at(&mut bytes, 0).map_err(gone)?;
        match word(&bytes[..length], 0) {
            // It has no memory, or not its new memory yet.
            None | Some(0) => return Err(NotHeld::Gone),
            // A 32-bit program has two numbers there.
            Some(name) if name >> 32 != 0 => return Err(NotHeld::Layout),
            Some(_) => {}
        }
        let vector = Vector::read(&|at| word(&bytes[..length], at), 0).ok_or(NotHeld::Layout)?;
        match Status::read(&format!("/proc/{pid}/status")).map_err(gone)? {
            Status { tracer: 0, seccomp: 0, .. } => Self::lead(pid.cast_signed(), memory, &vector, limit),
            Status { tracer: 0, .. } => Err(NotHeld::Filtered),
            Status { tracer, .. } => Err(NotHeld::Traced(tracer)),
        }
    }

    fn lead(pid: i32, memory: File, vector: &Vector, limit: Duration) -> Result<Self, NotHeld> {
        let read = |at, bytes: usize| {
            let mut read = vec![0; bytes];
            memory.read_exact_at(&mut read, at).map(|()| read).map_err(|_| NotHeld::Gone)
        };
        // The program headers are in the first page of their file.
        let page = vector.headers & !(PAGE_BYTES - 1);
        let headers = read(page, PAGE_BYTES as usize)?;
        let end = vector.end_of_text(&|at| word(&headers, at.checked_sub(page)?)).ok_or(NotHeld::Layout)?;
        let start = vector.entry & !7;
        let code = read(start, CODE_BYTES.min((end - start) as usize))?;
        let found = Entry::find(vector.entry, &code[(vector.entry - start) as usize..]).ok_or(NotHeld::Entry)?;
        let rounds = u32::try_from(limit.as_nanos() / u128::from(PAUSE_NS)).unwrap_or(u32::MAX).max(1);
        let pace = Pace { rounds, nanoseconds: PAUSE_NS };
        let onward = (found.first, vector.entry + found.first.len() as u64);
        let (range, go) = write_code(&memory, end, pace, onward).map_err(|why| match why {
            NotHeld::System(error) => gone(error),
            why => why,
        })?;
        let jumps = Jumps::new(vector.entry, &code, &found, range.start).ok_or(NotHeld::Entry)?;
        // If the second write fails, nothing leads to the long jump.
        memory.write_all_at(&jumps.long.now, jumps.long.at).map_err(gone)?;
        memory.write_all_at(&jumps.short.now, jumps.short.at).map_err(gone)?;
        Ok(Self { pid, memory, code: range, go, jumps: Some(jumps) })
    }
}

/// Converts an error of reading or writing a process.
fn gone(error: io::Error) -> NotHeld {
    match (error.raw_os_error(), error.kind()) {
        (Some(libc::ENOENT | libc::ESRCH), _) | (_, io::ErrorKind::WriteZero) => NotHeld::Gone,
        _ => NotHeld::System(error),
    }
}

fn word(bytes: &[u8], at: u64) -> Option<u64> {
    let bytes = bytes.get(usize::try_from(at).ok()?..)?;
    bytes.first_chunk().map(|word| u64::from_ne_bytes(*word))
}

/// The parts of a program's entry code that can be changed.
#[derive(Debug, PartialEq, Eq)]
struct Entry {
    /// Its first instruction.
    first: &'static [u8],
    /// Offset from the entry point of padding for a long jump.
    padding: usize,
}

impl Entry {
    /// Examines `code`, which begins at `address`.
    fn find(address: u64, code: &[u8]) -> Option<Self> {
        let first = FIRST.into_iter().find(|first| code.starts_with(first))?;
        // This byte may also be part of an address: then no padding follows.
        let ends = code.iter().take(MOST_ENTRY_BYTES).enumerate().filter(|(_, byte)| **byte == HLT);
        let padding = ends.into_iter().find_map(|(hlt, _)| padding(address, code, hlt + 1))?;
        (padding - SHORT_BYTES <= i8::MAX as usize).then_some(Self { first, padding })
    }
}

/// Offset of padding for a long jump in `code`, at or after `from`, where the entry code ends.
fn padding(address: u64, code: &[u8], from: usize) -> Option<usize> {
    let is_padding =
        |byte: &u8| matches!(byte, 0x00 | 0x0f | 0x1f | 0x2e | 0x40 | 0x44 | 0x66 | 0x80 | 0x84 | 0x90 | 0xcc);
    let length_at = |from: usize| {
        let next = (address + from as u64).next_multiple_of(ALIGNMENT) - address;
        code.get(from..next as usize).filter(|bytes| bytes.iter().all(is_padding)).map(<[u8]>::len)
    };
    let length = length_at(from)?;
    if length >= LONG_BYTES {
        return Some(from);
    }
    // Programs that are not position-independent have an empty function there.
    let next = &code[from + length..];
    let next = next.strip_prefix(ENDBR).unwrap_or(next).strip_prefix(&[RET])?;
    let from = code.len() - next.len();
    length_at(from).filter(|length| *length >= LONG_BYTES).map(|_| from)
}

/// The jumps that lead a process to where it waits.
#[derive(Debug)]
pub(crate) struct Jumps {
    /// At the entry point.
    pub(crate) short: Changed,
    long: Changed,
}

/// Bytes of a process that were changed.
#[derive(Debug)]
pub(crate) struct Changed {
    at: u64,
    before: Vec<u8>,
    now: Vec<u8>,
}

impl Changed {
    /// Restores the bytes, unless something else has changed them since or the process has ended.
    pub(crate) fn put_back(&self, memory: &File) {
        let mut bytes = vec![0; self.now.len()];
        if memory.read_exact_at(&mut bytes, self.at).is_ok() && bytes == self.now {
            let _ = memory.write_all_at(&self.before, self.at);
        }
    }
}

impl Jumps {
    /// Jumps from the entry point to `to`. `code` begins with the 8-byte word that contains the entry point.
    fn new(entry: u64, code: &[u8], found: &Entry, to: u64) -> Option<Self> {
        let within = (entry % 8) as usize;
        let before = code.get(..8)?.to_vec();
        let mut now = before.clone();
        // `None` if this would take two writes.
        now.get_mut(within..within + SHORT_BYTES)?.copy_from_slice(&[0xeb, (found.padding - SHORT_BYTES) as u8]);
        let short = Changed { at: entry - within as u64, before, now };
        let at = entry + found.padding as u64;
        let distance = i32::try_from(to.wrapping_sub(at + LONG_BYTES as u64).cast_signed()).ok()?;
        let before = code.get(within + found.padding..)?.get(..LONG_BYTES)?.to_vec();
        let long = Changed { at, before, now: [&[0xe9][..], &distance.to_le_bytes()].concat() };
        Some(Self { short, long })
    }

    /// Restores all changed bytes. The process must be waiting.
    pub(crate) fn put_back(&self, memory: &File) {
        self.short.put_back(memory);
        self.long.put_back(memory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Entry code of glibc, 0x22 bytes, and what follows it.
    fn code(first: &[u8], behind: &[u8]) -> Vec<u8> {
        let mut code = [first, &[0x49, 0x89, 0xd1, 0x5e, 0x48, 0x89, 0xe2]].concat();
        code.resize(0x21, 0x50);
        code.push(HLT);
        code.extend(behind);
        code
    }

    const NOPS: [u8; 14] = [0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0, 0x0f, 0x1f, 0x40, 0];

    #[test]
    fn padding_behind_the_entry_code_takes_the_long_jump() {
        for first in FIRST {
            assert_eq!(Entry::find(0x1000, &code(first, &NOPS)), Some(Entry { first, padding: 0x22 }));
        }
        let mut address = code(FIRST[0], &NOPS);
        address[0x1c] = HLT;
        assert_eq!(Entry::find(0x1000, &address), Some(Entry { first: FIRST[0], padding: 0x22 }));
        // Three bytes are too few; more follow an empty function.
        let empty = [&[0x90; 3][..], ENDBR, &[RET], &[0xcc; 11]].concat();
        assert_eq!(Entry::find(0x100b, &code(FIRST[0], &empty)), Some(Entry { first: FIRST[0], padding: 0x22 + 8 }));
    }

    #[test]
    fn other_code_is_left_alone() {
        assert_eq!(Entry::find(0x1000, &code(&[0xe9, 0, 0, 0, 0], &NOPS)), None, "an unknown instruction");
        assert_eq!(Entry::find(0x1000, &code(&[0xcc, 0xed], &NOPS)), None, "a breakpoint");
        assert_eq!(Entry::find(0x1000, &code(FIRST[0], &[0x55; 14])), None, "another function follows");
        assert_eq!(Entry::find(0x1000, &code(FIRST[0], &NOPS[..9])), None, "the text ends");
        assert_eq!(Entry::find(0x100b, &code(FIRST[0], &[0x90; 30])), None, "no empty function");
        assert_eq!(Entry::find(u64::MAX - 0x7f, &[0x31, 0xed]), None);
    }

    #[test]
    fn only_the_first_instruction_of_the_word_changes() {
        let text = [&[0xc3, 0xcc][..], &code(FIRST[1], &NOPS)].concat();
        let entry = Entry { first: FIRST[1], padding: 0x22 };
        let jumps = Jumps::new(0x1002, &text, &entry, 0x3000).expect("they fit");
        assert_eq!(
            (jumps.short.at, &jumps.short.now[..]),
            (0x1000, &[0xc3, 0xcc, 0xeb, 0x20, 0xed, 0x49, 0x89, 0xd1][..])
        );
        assert_eq!((jumps.long.at, &jumps.long.now[..]), (0x1024, &[0xe9, 0xd7, 0x1f, 0, 0][..]));
        assert_eq!((&jumps.short.before[..], &jumps.long.before[..]), (&text[..8], &NOPS[..5]));
        let over = [&[0xcc; 7][..], &text[2..]].concat();
        assert!(Jumps::new(0x1007, &over, &entry, 0x3000).is_none(), "its two bytes are in two words");
    }
}
