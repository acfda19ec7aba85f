//! The memory of a process with glibc's arenas, controlled by the fuzzer.

use heapbpf_glibc::{Files, Memory, Space, census, read};

#[path = "memory.rs"]
pub mod memory;

use memory::Pieces;

const PAGE: u64 = 4096;
/// Where the process has variables, the main heap and other mappings.
pub const DATA: u64 = 0x7f00_0000_0000;
const HEAP: u64 = 0x5500_0000_0000;
const MAPPED: [(u64, u64); 4] =
    [(0x7e00_0000_0000, 0x21000), (0x7e00_0800_0000, 0x1000), (0x7d00_0000_0000, 0x8000), (0x7b00_0000_0000, 0x8000)];
/// Where the process has mapped files, with classes and types.
const FILES: u64 = 0x7c00_0000_0000;

impl Memory for Pieces {
    fn page_bytes(&self) -> u64 {
        PAGE
    }

    fn present(&mut self, first: u64, pages: &mut [bool]) {
        for (page, number) in pages.iter_mut().zip(first..) {
            *page = number.checked_mul(PAGE).is_some_and(|at| Pieces::read(self, at, &mut [0]));
        }
    }

    fn read(&mut self, address: u64, buffer: &mut [u8]) -> bool {
        Pieces::read(self, address, buffer)
    }
}

/// Checks an input: the version (1 byte), and memory.
pub fn check(data: &[u8]) {
    let Some((version, rest)) = data.split_first() else { return };
    let space = Space {
        data: std::iter::once(DATA..DATA + 0x4000).collect(),
        heap: Some(HEAP..HEAP + 0x10_0000),
        anonymous: MAPPED.iter().map(|(start, length)| *start..start + length).collect(),
        threads: 2,
        has_python: false,
    };
    let (mut memory, version) = (Pieces::parse(rest), (*version).into());
    let files = Files { data: vec![FILES..FILES + 0x4000, FILES + 0x4000..FILES + 0x8000], has_python: true };
    let counted = census(&mut memory, &space, version, &files);
    let heap = read(&mut memory, &space, version);
    assert_eq!(counted.as_ref().map(|it| &it.heap), heap.as_ref(), "a census changes no figure");
    let (Ok(counted), Ok(heap)) = (counted, heap) else { return };
    let sum = counted.rows.iter().fold(0_u64, |sum, row| sum.saturating_add(row.bytes));
    assert!(heap.is_moving || sum <= heap.inuse_bytes + counted.python.inuse_bytes, "{counted:?}");
    assert!(heap.doubtful_bytes <= heap.inuse_bytes && heap.cached_bytes <= heap.free_bytes, "{heap:?}");
    assert!(heap.free_resident_bytes <= heap.free_bytes && heap.inuse_bytes < 1 << 48, "{heap:?}");
    assert!(heap.resident_bytes <= rest.len() as u64 * PAGE, "{heap:?}");
    let with_python = read(&mut memory, &Space { has_python: true, ..space }, version).expect("it was read");
    // Sizes that lie may leave too few pages to query.
    let python = with_python.python.as_ref();
    assert!(python.is_none_or(|python| python.pools == counted.python), "a census finds the same: {python:?}");
    assert!(with_python.ranges().is_sorted_by(|one, next| one.end < next.start), "{with_python:?}");
}
