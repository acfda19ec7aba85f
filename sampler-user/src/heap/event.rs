//! From the bytes of the events ring to events.

use std::mem::offset_of;

use sampler_ebpf::abi::{AllocationRecord, FreeRecord, ProcessRecord, StackRecord, UnmapRecord, kind};

/// A record of the events ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A sampled allocation.
    Allocation(AllocationRecord),
    /// The free of one.
    Free(FreeRecord),
    /// Addresses are mapped no longer.
    Unmap(UnmapRecord),
    /// A target forked; the child's process id is in the record.
    Fork(ProcessRecord),
    /// A process replaced its program.
    Exec(ProcessRecord),
    /// A process ended.
    Exit(ProcessRecord),
}

/// Reads a record; `None` if it is none (then kernel side and daemon do not belong together).
pub fn decode(bytes: &[u8]) -> Option<Event> {
    let kind = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?);
    Some(match kind {
        kind::ALLOCATION => Event::Allocation(read(bytes)?),
        kind::FREE => Event::Free(read(bytes)?),
        kind::UNMAP => Event::Unmap(read(bytes)?),
        kind::FORK => Event::Fork(read(bytes)?),
        kind::EXEC => Event::Exec(read(bytes)?),
        kind::EXIT => Event::Exit(read(bytes)?),
        _ => return None,
    })
}

/// CLOCK_MONOTONIC of a record; 0 if it is none. That is read after the record's place in the ring was reserved, so all
/// records with a time up to T lie before the place that is reserved next at T. Not of an unmap: its time is that of the
/// call's entry.
pub fn time_ns_of(bytes: &[u8]) -> u64 {
    let word = |at: usize| Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let kind = bytes.get(..4).and_then(|kind| kind.try_into().ok()).map_or(0, u32::from_ne_bytes);
    let at = match kind {
        kind::ALLOCATION => offset_of!(AllocationRecord, time_ns),
        kind::FREE => offset_of!(FreeRecord, time_ns),
        kind::UNMAP => offset_of!(UnmapRecord, time_ns),
        kind::FORK | kind::EXEC | kind::EXIT => offset_of!(ProcessRecord, time_ns),
        _ => return 0,
    };
    word(at).unwrap_or(0)
}

/// Reads a stack record: its head, and the stack's bytes as far as they are valid.
pub fn decode_stack(bytes: &[u8]) -> Option<(StackRecord, &[u8])> {
    let head: StackRecord = read(bytes)?;
    let copy = bytes.get(size_of::<StackRecord>()..)?;
    Some((head, copy.get(..head.copied_bytes as usize)?))
}

/// Records of the rings: `repr(C)`, integers only.
///
/// # Safety
/// Any bytes must be a valid value.
unsafe trait Record: Copy {}
// SAFETY: see the types.
unsafe impl Record for AllocationRecord {}
// SAFETY: see the types.
unsafe impl Record for FreeRecord {}
// SAFETY: see the types.
unsafe impl Record for ProcessRecord {}
// SAFETY: see the types.
unsafe impl Record for UnmapRecord {}
// SAFETY: see the types.
unsafe impl Record for StackRecord {}

fn read<T: Record>(bytes: &[u8]) -> Option<T> {
    let bytes = bytes.get(..size_of::<T>())?;
    // SAFETY: `Record` promises that any bytes are a value; there are enough of them.
    Some(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

/// The bytes of a record, as the kernel side writes them.
#[cfg(test)]
fn bytes_of<T: Record>(record: &T) -> Vec<u8> {
    // SAFETY: plain integers without padding.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(record).cast::<u8>(), size_of::<T>()) }.to_vec()
}

#[cfg(test)]
impl Event {
    /// The bytes that it is decoded from.
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        match self {
            Self::Allocation(record) => bytes_of(&record),
            Self::Free(record) => bytes_of(&record),
            Self::Unmap(record) => bytes_of(&record),
            Self::Fork(record) | Self::Exec(record) | Self::Exit(record) => bytes_of(&record),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_back_as_they_were_written() {
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
        ] {
            assert_eq!(time_ns_of(&bytes), time_ns);
            assert_eq!(time_ns_of(&bytes[..8]), 0);
        }
        assert_eq!((time_ns_of(&[]), time_ns_of(&[99; 200])), (0, 0));
    }

    #[test]
    fn what_is_short_or_unknown_is_refused() {
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
