//! Records of both rings, with any length and content.

use heapbpf_heap::event::{Event, decode, decode_python, decode_python_code, decode_stack, time_ns_of};
use sampler_ebpf::abi::{OuterCopy, StackRecord};

/// Checks a record.
pub fn check(data: &[u8]) {
    let time_ns = match decode(data) {
        Some(Event::Allocation(record)) => record.time_ns,
        Some(Event::Free(record)) => record.time_ns,
        Some(Event::Unmap(record)) => record.time_ns,
        Some(Event::Fork(record) | Event::Exec(record) | Event::Exit(record) | Event::Reset(record)) => record.time_ns,
        Some(Event::Uncounted(record)) => record.time_ns,
        // It may have a time but be too short for the rest.
        None => time_ns_of(data),
    };
    assert_eq!(time_ns_of(data), time_ns);
    if let Some(stack) = decode_stack(data) {
        let (head, copy) = (stack.head, stack.copy());
        assert_eq!(copy.bytes.len(), head.copied_bytes as usize);
        assert_eq!(copy.pieces.len(), head.pieces as usize);
        let outer = if head.pieces > 0 { size_of::<OuterCopy>() } else { 0 };
        assert!(data[size_of::<StackRecord>() + outer..].starts_with(copy.bytes));
        for piece in copy.pieces {
            assert!(copy.end() >= u64::from(piece.offset) + piece.bytes.len() as u64);
        }
    }
    assert!(decode_python(data).is_none() || decode_python_code(data).is_none(), "a record is of one kind");
}
