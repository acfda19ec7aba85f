//! Decodes the records of the events ring.

use std::mem::offset_of;

use heapbpf_unwind::memory::{Piece, StackCopy};
use sampler_ebpf::abi::{
    AllocationRecord, CrashRecord, FreeRecord, OUTER_PIECES, OuterCopy, ProcessRecord, PythonCodeRecord, PythonRecord,
    StackRecord, UnmapRecord, kind,
};
use zerocopy::FromBytes;

/// A record of the events ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A sampled allocation.
    Allocation(AllocationRecord),
    /// The free of a sampled block.
    Free(FreeRecord),
    /// An address range was unmapped.
    Unmap(UnmapRecord),
    /// A target forked. The record has the child's process id.
    Fork(ProcessRecord),
    /// A process executed a new program.
    Exec(ProcessRecord),
    /// A process ended.
    Exit(ProcessRecord),
    /// An exec dropped the state of a process.
    Reset(ProcessRecord),
    /// A program has ended, and nothing counted it.
    Uncounted(ProcessRecord),
}

/// Decodes a record; `None` if it is too short or of an unknown kind, for example from another version's BPF object.
pub fn decode(bytes: &[u8]) -> Option<Event> {
    let kind = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?);
    Some(match kind {
        kind::ALLOCATION => Event::Allocation(read(bytes)?),
        kind::FREE => Event::Free(read(bytes)?),
        kind::UNMAP => Event::Unmap(read(bytes)?),
        kind::FORK => Event::Fork(read(bytes)?),
        kind::EXEC => Event::Exec(read(bytes)?),
        kind::EXIT => Event::Exit(read(bytes)?),
        kind::RESET => Event::Reset(read(bytes)?),
        kind::UNCOUNTED => Event::Uncounted(read(bytes)?),
        _ => return None,
    })
}

/// Decodes the record of a process that dies of a fault; `None` if it is any other record of the events ring.
pub fn decode_crash(bytes: &[u8]) -> Option<CrashRecord> {
    let is_crash = bytes.first_chunk().is_some_and(|kind| u32::from_ne_bytes(*kind) == kind::CRASH);
    if is_crash { read(bytes) } else { None }
}

/// Returns the time of a record (CLOCK_MONOTONIC); 0 if it cannot be decoded. The BPF side reads the clock after
/// reserving the record in the ring, so every record with a time up to T lies before the position that is reserved next
/// at T. Unmaps are an exception: their time is that of the call's entry.
pub fn time_ns_of(bytes: &[u8]) -> u64 {
    let word = |at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let kind = bytes.get(..4).and_then(|kind| kind.try_into().ok()).map_or(0, u32::from_ne_bytes);
    let at = match kind {
        kind::ALLOCATION => offset_of!(AllocationRecord, time_ns),
        kind::FREE => offset_of!(FreeRecord, time_ns),
        kind::UNMAP => offset_of!(UnmapRecord, time_ns),
        kind::FORK | kind::EXEC | kind::EXIT | kind::RESET | kind::UNCOUNTED => offset_of!(ProcessRecord, time_ns),
        _ => return 0,
    };
    word(at).unwrap_or(0)
}

/// Decodes a record of Python frames; `None` if it is any other record of the stacks ring.
pub fn decode_python(bytes: &[u8]) -> Option<&PythonRecord> {
    let (record, _) = PythonRecord::ref_from_prefix(bytes).ok()?;
    (record.mark == PythonRecord::MARK).then_some(record)
}

/// Decodes a record of a Python code object; `None` if it is any other record of the stacks ring.
pub fn decode_python_code(bytes: &[u8]) -> Option<&PythonCodeRecord> {
    let (record, _) = PythonCodeRecord::ref_from_prefix(bytes).ok()?;
    (record.mark == PythonCodeRecord::MARK).then_some(record)
}

/// A record with a copy of a stack.
#[derive(Debug, PartialEq, Eq)]
pub struct StackCopied<'a> {
    /// Its header.
    pub head: StackRecord,
    bytes: &'a [u8],
    pieces: [Piece<'a>; OUTER_PIECES],
}

impl StackCopied<'_> {
    /// The copy.
    pub fn copy(&self) -> StackCopy<'_> {
        StackCopy { bytes: self.bytes, pieces: &self.pieces[..self.head.pieces as usize] }
    }
}

/// Decodes a stack record; `None` if it is shorter than its header says, or if a piece of the stack is out of range.
pub fn decode_stack(bytes: &[u8]) -> Option<StackCopied<'_>> {
    let head: StackRecord = read(bytes)?;
    let mut rest = bytes.get(size_of::<StackRecord>()..)?;
    let mut pieces = [Piece::default(); OUTER_PIECES];
    if head.pieces > 0 {
        let (outer, inner) = OuterCopy::ref_from_prefix(rest).ok()?;
        let copied = outer.pieces.iter().zip(&outer.bytes);
        for (piece, (place, bytes)) in pieces.get_mut(..head.pieces as usize)?.iter_mut().zip(copied) {
            let offset = u32::try_from(place.start.checked_sub(head.registers.sp)?).ok()?;
            *piece = Piece { offset, bytes: bytes.get(..usize::try_from(place.bytes).ok()?)? };
        }
        rest = inner;
    }
    Some(StackCopied { head, bytes: rest.get(..head.copied_bytes as usize)?, pieces })
}

/// Reads a value from the start of `bytes`; `None` if there are too few.
fn read<T: FromBytes>(bytes: &[u8]) -> Option<T> {
    T::read_from_prefix(bytes).ok().map(|(value, _)| value)
}

/// The bytes of a record, as the BPF side writes them.
#[cfg(any(test, feature = "testing"))]
fn bytes_of(record: &(impl zerocopy::IntoBytes + zerocopy::Immutable)) -> Vec<u8> {
    record.as_bytes().to_vec()
}

#[cfg(any(test, feature = "testing"))]
impl Event {
    /// Returns the record that decodes to this event.
    #[must_use]
    pub fn to_bytes(self) -> Vec<u8> {
        match self {
            Self::Allocation(record) => bytes_of(&record),
            Self::Free(record) => bytes_of(&record),
            Self::Unmap(record) => bytes_of(&record),
            Self::Fork(record)
            | Self::Exec(record)
            | Self::Exit(record)
            | Self::Reset(record)
            | Self::Uncounted(record) => bytes_of(&record),
        }
    }
}

#[cfg(test)]
mod tests {
    use sampler_ebpf::abi::{OUTER_PIECE_BYTES, Registers, StackPiece};

    use super::*;

    #[test]
    fn records_decode_to_what_was_written() {
        let free =
            FreeRecord { kind: kind::FREE, tid: 7, sample: 1 << 40, time_ns: 9, temporary: 1, ..Default::default() };
        assert_eq!(decode(&bytes_of(&free)), Some(Event::Free(free)));
        let allocation = AllocationRecord { kind: kind::ALLOCATION, size_bytes: u64::MAX >> 17, ..Default::default() };
        assert_eq!(decode(&bytes_of(&allocation)), Some(Event::Allocation(allocation)));
        let crash = CrashRecord { kind: kind::CRASH, signal: 11, ip: 1 << 46, ..Default::default() };
        let bytes = bytes_of(&crash);
        assert_eq!((decode_crash(&bytes), decode(&bytes)), (Some(crash), None));
        assert_eq!([&bytes[..39], &bytes[..3], &bytes_of(&free)].map(decode_crash), [None; 3]);
    }

    #[test]
    fn the_time_of_a_record_is_known_without_decoding_it() {
        let time_ns = 0x0102_0304_0506;
        let process = |kind| bytes_of(&ProcessRecord { kind, time_ns, ..Default::default() });
        for bytes in [
            bytes_of(&AllocationRecord { kind: kind::ALLOCATION, time_ns, ..Default::default() }),
            bytes_of(&FreeRecord { kind: kind::FREE, time_ns, ..Default::default() }),
            bytes_of(&UnmapRecord { kind: kind::UNMAP, time_ns, ..Default::default() }),
            process(kind::FORK),
            process(kind::EXEC),
            process(kind::EXIT),
            process(kind::RESET),
            process(kind::UNCOUNTED),
        ] {
            assert_eq!(time_ns_of(&bytes), time_ns);
            assert_eq!(time_ns_of(&bytes[..8]), 0);
        }
        assert_eq!((time_ns_of(&[]), time_ns_of(&[99; 200])), (0, 0));
    }

    #[test]
    fn records_that_are_short_or_of_unknown_kind_are_rejected() {
        let free = FreeRecord { kind: kind::FREE, ..Default::default() };
        let bytes = bytes_of(&free);
        assert_eq!(decode(&bytes[..bytes.len() - 1]), None);
        assert_eq!(decode(&[]), None);
        assert_eq!(decode(&[99; 200]), None);
        let mut stack = bytes_of(&StackRecord { copied_bytes: 3, ..Default::default() });
        stack.extend([1, 2, 3, 4]);
        assert_eq!(decode_stack(&stack).unwrap().copy(), StackCopy::from([1, 2, 3].as_slice()));
        let lies = bytes_of(&StackRecord { copied_bytes: 1000, ..Default::default() });
        assert_eq!(decode_stack(&lies), None);
    }

    #[test]
    fn pieces_of_a_stack_are_where_the_record_says() {
        let sp = 0x7fff_0000_1000;
        let registers = Registers { sp, ..Registers::default() };
        let head = StackRecord { registers, copied_bytes: 4, pieces: 2, ..StackRecord::default() };
        let mut outer =
            OuterCopy { pieces: [StackPiece::default(); OUTER_PIECES], bytes: [[0; OUTER_PIECE_BYTES]; OUTER_PIECES] };
        for (index, (offset, bytes)) in [(0x100, 3), (0x2000, OUTER_PIECE_BYTES)].into_iter().enumerate() {
            outer.pieces[index] = StackPiece { start: sp + offset, bytes: bytes as u64 };
            outer.bytes[index][..bytes].fill(index as u8 + 1);
        }
        let record = |head: &StackRecord, outer: &OuterCopy| [bytes_of(head), bytes_of(outer), vec![9; 4]].concat();
        let whole = record(&head, &outer);
        let decoded = decode_stack(&whole).unwrap();
        let pieces =
            [Piece { offset: 0x100, bytes: &[1; 3] }, Piece { offset: 0x2000, bytes: &[2; OUTER_PIECE_BYTES] }];
        assert_eq!(decoded.copy(), StackCopy { bytes: &[9; 4], pieces: &pieces });
        assert_eq!(decode_stack(&whole[..whole.len() - 1]), None, "too short");
        assert_eq!(
            decode_stack(&record(&StackRecord { pieces: 9, ..head }, &outer)),
            None,
            "more than there is space for"
        );
        for wrong in [
            StackPiece { start: sp - 1, bytes: 1 },
            StackPiece { start: sp + (1 << 32), bytes: 1 },
            StackPiece { start: sp, bytes: OUTER_PIECE_BYTES as u64 + 1 },
        ] {
            let mut outer = outer;
            outer.pieces[1] = wrong;
            assert_eq!(decode_stack(&record(&head, &outer)), None, "{wrong:?}");
            assert!(
                decode_stack(&record(&StackRecord { pieces: 1, ..head }, &outer)).is_some(),
                "of which nothing is used"
            );
        }
    }
}
