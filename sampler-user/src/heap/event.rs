//! Decodes the records of the events ring.

use std::mem::offset_of;

use sampler_ebpf::abi::{
    AllocationRecord, FreeRecord, ProcessRecord, PythonCodeRecord, PythonRecord, StackRecord, UnmapRecord, kind,
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
    /// A process replaced its program.
    Exec(ProcessRecord),
    /// A process ended.
    Exit(ProcessRecord),
    /// An exec dropped what was noted of a process.
    Reset(ProcessRecord),
}

/// Decodes a record; `None` if it is too short or of an unknown kind, as from a BPF object of another version.
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
        _ => return None,
    })
}

/// Time of a record (CLOCK_MONOTONIC); 0 if it cannot be decoded. The BPF side reads the clock after it has reserved the
/// record's place in the ring, so all records with times up to T lie before the place that is reserved next at T. An unmap is
/// an exception: its time is that of the call's entry.
pub fn time_ns_of(bytes: &[u8]) -> u64 {
    let word = |at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let kind = bytes.get(..4).and_then(|kind| kind.try_into().ok()).map_or(0, u32::from_ne_bytes);
    let at = match kind {
        kind::ALLOCATION => offset_of!(AllocationRecord, time_ns),
        kind::FREE => offset_of!(FreeRecord, time_ns),
        kind::UNMAP => offset_of!(UnmapRecord, time_ns),
        kind::FORK | kind::EXEC | kind::EXIT | kind::RESET => offset_of!(ProcessRecord, time_ns),
        _ => return 0,
    };
    word(at).unwrap_or(0)
}

/// Decodes a record of Python frames; `None` if it is another of the stacks ring.
pub fn decode_python(bytes: &[u8]) -> Option<&PythonRecord> {
    let (record, _) = PythonRecord::ref_from_prefix(bytes).ok()?;
    (record.mark == PythonRecord::MARK).then_some(record)
}

/// Decodes a record of a Python code object; `None` if it is another of the stacks ring.
pub fn decode_python_code(bytes: &[u8]) -> Option<&PythonCodeRecord> {
    let (record, _) = PythonCodeRecord::ref_from_prefix(bytes).ok()?;
    (record.mark == PythonCodeRecord::MARK).then_some(record)
}

/// Decodes a stack record: its header, and the bytes of the stack copy. `None` if the record is too short for what the header
/// says.
pub fn decode_stack(bytes: &[u8]) -> Option<(StackRecord, &[u8])> {
    let head: StackRecord = read(bytes)?;
    let copy = bytes.get(size_of::<StackRecord>()..)?;
    Some((head, copy.get(..head.copied_bytes as usize)?))
}

/// Reads a value from the start of the bytes; `None` if there are too few.
fn read<T: FromBytes>(bytes: &[u8]) -> Option<T> {
    T::read_from_prefix(bytes).ok().map(|(value, _)| value)
}

/// The bytes of a record, as the BPF side writes them.
#[cfg(test)]
fn bytes_of(record: &(impl zerocopy::IntoBytes + zerocopy::Immutable)) -> Vec<u8> {
    record.as_bytes().to_vec()
}

#[cfg(test)]
impl Event {
    /// The record that decodes to this event.
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        match self {
            Self::Allocation(record) => bytes_of(&record),
            Self::Free(record) => bytes_of(&record),
            Self::Unmap(record) => bytes_of(&record),
            Self::Fork(record) | Self::Exec(record) | Self::Exit(record) | Self::Reset(record) => bytes_of(&record),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_decode_to_what_was_written() {
        let free =
            FreeRecord { kind: kind::FREE, tid: 7, sample: 1 << 40, time_ns: 9, temporary: 1, ..Default::default() };
        assert_eq!(decode(&bytes_of(&free)), Some(Event::Free(free)));
        let allocation = AllocationRecord { kind: kind::ALLOCATION, size_bytes: u64::MAX >> 17, ..Default::default() };
        assert_eq!(decode(&bytes_of(&allocation)), Some(Event::Allocation(allocation)));
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
        assert_eq!(decode_stack(&stack).map(|(_, copy)| copy.to_vec()), Some(vec![1, 2, 3]));
        let lies = bytes_of(&StackRecord { copied_bytes: 1000, ..Default::default() });
        assert_eq!(decode_stack(&lies), None);
    }
}
