//! The stacks of a stopped thread: who owns them, and their words, bounded. Pure.

use crate::frame::SEGMENTS;
use crate::maps::{Maps, PAGE_BYTES};
use crate::sys::Registers;

/// Most bytes that are read of one stack.
pub(crate) const MAX_BYTES: usize = 1 << 20;
/// Most stacks of one thread: each signal handler may run on another one.
const MAX_STACKS: usize = 4;
const WORD: u64 = 8;

/// Whether a thread is on the stack that it was given when it began, with space down to `lowest`. Then the memory below
/// the stack pointer is not used for anything else. A coroutine's stack may be small, and in the middle of data that
/// other threads change.
pub(crate) fn is_given(maps: &Maps, registers: &Registers, is_main: bool, lowest: u64) -> bool {
    let Some(mapping) = maps.at(registers.rsp) else { return false };
    if is_main {
        return mapping.name == "[stack]";
    }
    // C libraries keep the thread pointer at the end of a thread's stack, and a guard page at the beginning.
    let is_private = mapping.is_writable && !mapping.is_shared;
    is_private && (registers.rsp..mapping.range.end).contains(&registers.fs_base) && mapping.range.start <= lowest
}

/// The words of a thread's stacks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Words {
    /// The address of the first word, and the words, of each stack.
    stacks: Vec<(u64, Vec<u64>)>,
    /// Whether words in between were not read, because their pages are not in memory.
    pub(crate) has_gaps: bool,
}

/// What could be read of a page of a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// This many bytes. If that is not the whole page, the stack ends there.
    Held(usize),
    /// Nothing was ever written there.
    Empty,
    /// The page is not in memory.
    Absent,
}

impl Words {
    /// Reads from the stack pointer up to the thread pointer, which C libraries keep at the end of a thread's stack, or
    /// as far as `read` succeeds. Does the same from the stack pointers of interrupted code.
    pub(crate) fn read(stack_pointer: u64, thread_pointer: u64, mut read: impl FnMut(u64, &mut [u8]) -> Piece) -> Self {
        let mut words = Self { stacks: Vec::new(), has_gaps: false };
        let mut starts = vec![stack_pointer & !(WORD - 1)];
        while let Some(start) = starts.pop() {
            if words.stacks.iter().any(|(from, stack)| (*from..=*from + WORD * stack.len() as u64).contains(&start)) {
                continue;
            }
            if words.stacks.len() == MAX_STACKS {
                break;
            }
            let stack = words.one_stack(start, thread_pointer, &mut read);
            starts.extend(signal_frames(&stack).map(|at| stack[at - 1] & !(WORD - 1)));
            words.stacks.push((start, stack));
        }
        words
    }

    fn one_stack(
        &mut self,
        start: u64,
        thread_pointer: u64,
        read: &mut impl FnMut(u64, &mut [u8]) -> Piece,
    ) -> Vec<u64> {
        let end = thread_pointer.checked_sub(start).filter(|bytes| *bytes > 0 && *bytes <= MAX_BYTES as u64);
        let bytes = end.map_or(MAX_BYTES, |bytes| bytes as usize & !7);
        let mut stack = Vec::new();
        while stack.len() * 8 < bytes {
            let at = start + stack.len() as u64 * WORD;
            let in_page = (PAGE_BYTES - at % PAGE_BYTES) as usize;
            let mut page = [0; PAGE_BYTES as usize];
            let page = &mut page[..in_page.min(bytes - stack.len() * 8)];
            let piece = read(at, page);
            let got = if let Piece::Held(got) = piece { got.min(page.len()) } else { page.len() };
            self.has_gaps |= piece == Piece::Absent;
            stack.extend(page[..got].as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)));
            if got < page.len() {
                break;
            }
        }
        stack
    }

    /// Addresses of the words in signal frames that say where interrupted code goes on, and their content.
    pub(crate) fn resume_addresses(&self) -> impl Iterator<Item = (u64, u64)> {
        self.stacks
            .iter()
            .flat_map(|(start, stack)| signal_frames(stack).map(move |at| (start + WORD * at as u64, stack[at])))
    }
}

/// Indices of what may be the saved instruction pointers of signal frames, which hold stack pointer, instruction
/// pointer, flags and segments in a row.
fn signal_frames(stack: &[u64]) -> impl Iterator<Item = usize> {
    (1..stack.len().saturating_sub(2)).filter(|at| stack[at + 2] == SEGMENTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory that begins at an address.
    fn memory(start: u64, words: &[u64]) -> impl Fn(u64, &mut [u8]) -> Piece {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        move |at, into| {
            let from = at.checked_sub(start).and_then(|from| bytes.get(from as usize..)).unwrap_or_default();
            let count = from.len().min(into.len());
            into[..count].copy_from_slice(&from[..count]);
            Piece::Held(count)
        }
    }

    #[test]
    fn a_thread_is_on_its_own_stack_below_its_thread_pointer_or_where_the_kernel_says_so() {
        let maps = "10000-50000 rw-p 0 0:0 0 [heap]\n60000-80000 rw-p 0 0:0 0\n90000-a0000 rw-p 0 0:0 0 [stack]\n\
                    b0000-c0000 rw-s 0 0:0 0\n";
        let maps = Maps::parse(maps, 0);
        let is_given = |rsp: u64, fs_base: u64, is_main| {
            // SAFETY: a struct of integers.
            let zeros: Registers = unsafe { std::mem::zeroed() };
            is_given(&maps, &Registers { rsp, fs_base, ..zeros }, is_main, rsp - 0x1000)
        };
        assert!(is_given(0x9f000, 0x7f000, true) && is_given(0x70000, 0x7f000, false));
        // In the heap or in another mapping, as coroutines are; above the thread pointer; where the mapping ends.
        assert!(!is_given(0x20000, 0x7f000, true) && !is_given(0x20000, 0x7f000, false));
        assert!(!is_given(0x70000, 0x7f000, true) && !is_given(0x9f000, 0x7f000, false));
        assert!(!is_given(0x7f800, 0x7f000, false) && !is_given(0x60800, 0x7f000, false));
        assert!(!is_given(0xb8000, 0xbf000, false) && !is_given(0x85000, 0x86000, false));
    }

    /// All words, stack by stack.
    fn all(words: &Words) -> Vec<u64> {
        words.stacks.iter().flat_map(|(_, stack)| stack).copied().collect()
    }

    #[test]
    fn words_are_read_to_the_end_of_the_mapping() {
        assert_eq!(all(&Words::read(0x1003, 0, memory(0x1000, &[1, 2, 3]))), [1, 2, 3]);
        assert_eq!(all(&Words::read(0x5000, 0, memory(0x1000, &[]))), [0; 0], "a stack pointer into nowhere");
    }

    #[test]
    fn the_thread_pointer_ends_a_stack_and_the_bound_a_deep_one() {
        let deep = vec![7; MAX_BYTES / 8 + 1];
        assert_eq!(all(&Words::read(0x1000, 0, memory(0x1000, &deep))).len(), MAX_BYTES / 8);
        assert_eq!(all(&Words::read(0x1000, 0x1010, memory(0x1000, &[1, 2, 3]))), [1, 2]);
    }

    #[test]
    fn pages_without_words_are_passed_and_absent_ones_told() {
        let stack = |second| {
            Words::read(0x1ff0, 0x3010, move |at, into: &mut [u8]| match at {
                0x2000 => second,
                _ => {
                    into[..8].copy_from_slice(&at.to_le_bytes());
                    Piece::Held(into.len())
                }
            })
        };
        let (empty, absent) = (stack(Piece::Empty), stack(Piece::Absent));
        assert!(!empty.has_gaps && all(&empty).contains(&0x3000));
        assert!(absent.has_gaps && all(&absent).contains(&0x3000));
    }

    #[test]
    fn a_signal_frame_leads_to_the_stack_it_interrupted() {
        let memory = |at: u64, into: &mut [u8]| match at {
            0x9000.. => memory(0x9000, &[5, 0x1000, 0x4242, 0x246, SEGMENTS, 0])(at, into),
            _ => memory(0x1000, &[0x77, 0x88])(at, into),
        };
        let words = Words::read(0x9000, 0, memory);
        assert_eq!(words.resume_addresses().collect::<Vec<_>>(), [(0x9010, 0x4242)]);
        assert!(all(&words).contains(&0x88));
    }

    #[test]
    fn frames_that_lead_to_each_other_end() {
        let words =
            Words::read(0x1000, 0, memory(0x1000, &[0x1008, 0x1000, 1, 2, SEGMENTS, 0x1008, 1, 2, SEGMENTS, 0]));
        assert_eq!(words.stacks.len(), 1);
        let everywhere = |at: u64, into: &mut [u8]| memory(at, &[at + 0x1_0000, 1, 2, SEGMENTS, 0])(at, into);
        assert_eq!(Words::read(0x1000, 0, everywhere).stacks.len(), MAX_STACKS);
    }
}
