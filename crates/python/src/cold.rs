//! Parts of a function that the compiler has moved elsewhere because they rarely run. A stripped file does not name
//! them, but they are the only targets of conditional jumps out of a function.

use std::ops::Range;

use heapbpf_elf::{Elf, Image, read_range};
use iced_x86::{Decoder, DecoderOptions, FlowControl};

/// Largest function that is disassembled, bytes.
const MOST_CODE_BYTES: u64 = 1 << 20;
/// Largest function table that is read, bytes.
const MOST_TABLE_BYTES: u64 = 16 << 20;

/// Returns the addresses of the other parts of the function at `hot`.
pub fn parts(image: &dyn Image, elf: &Elf, hot: &Range<u64>) -> Vec<Range<u64>> {
    let Some(offset) = elf.offset_of_address(hot.start) else { return Vec::new() };
    let Ok(code) = read_range(image, "a function", offset, hot.end - hot.start, MOST_CODE_BYTES) else {
        return Vec::new();
    };
    let starts = starts(image, elf);
    let mut parts: Vec<Range<u64>> = Vec::new();
    let decoder = Decoder::with_ip(64, &code, hot.start, DecoderOptions::NONE);
    for instruction in decoder {
        let target = instruction.near_branch_target();
        let leaves = instruction.flow_control() == FlowControl::ConditionalBranch && !hot.contains(&target);
        if !leaves || parts.iter().any(|part| part.contains(&target)) {
            continue;
        }
        let after = starts.partition_point(|start| *start <= target);
        if let (Some(&start), Some(&end)) = (after.checked_sub(1).and_then(|at| starts.get(at)), starts.get(after)) {
            parts.push(start..end);
        }
    }
    parts
}

/// Returns the start address of each function, from the search table of the unwind information.
fn starts(image: &dyn Image, elf: &Elf) -> Vec<u64> {
    let Some(section) = elf.section(".eh_frame_hdr") else { return Vec::new() };
    let Ok(bytes) = section.read(image, MOST_TABLE_BYTES) else { return Vec::new() };
    // Version 1 with the usual encodings: a 32-bit count, and pairs of 32-bit values relative to the section.
    if bytes.len() < 12 || bytes[..4] != [1, 0x1b, 0x03, 0x3b] {
        return Vec::new();
    }
    let pairs = bytes[12..].chunks_exact(8);
    let mut starts: Vec<u64> = pairs
        .map(|pair| {
            section.address.wrapping_add_signed(i64::from(i32::from_le_bytes([pair[0], pair[1], pair[2], pair[3]])))
        })
        .collect();
    starts.sort_unstable();
    starts
}
