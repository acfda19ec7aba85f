//! CPython's code objects, line tables, frames and its own table of offsets, all controlled by the fuzzer.

use heapbpf_python::layout::LineFormat;
use heapbpf_python::{Code, Layout, Memory, Version, debug_offsets, invocations, lines};
use sampler_ebpf::abi::{PYTHON_FRAME_BYTES, PythonFrame, check as identity_of};

#[path = "memory.rs"]
pub mod memory;

use memory::Pieces;

impl Memory for Pieces {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        self.read(address, buffer)
    }
}

/// Longest name or path in bytes.
const LONGEST_NAME: usize = 1024 * 4;
/// Size of a frame in bytes.
const FRAME_BYTES: usize = 24;

/// Checks an input: the version, then the data. From version 13 on, the data is the interpreter's own table of offsets.
/// Before, it is the address of a code object, and memory. All data is also tried as frames and as a line table.
pub fn check(data: &[u8]) {
    let Some((&version, rest)) = data.split_first() else { return };
    for format in [LineFormat::Increments, LineFormat::Ranges, LineFormat::Locations] {
        for offset in [0, 2, 1000, u32::MAX] {
            assert_ne!(lines::line(format, rest, 1, offset), Some(0));
        }
    }
    if version >= 13 {
        if let Ok(layout) = debug_offsets::layout(rest) {
            assert!(layout.process.frame_bytes as usize <= PYTHON_FRAME_BYTES);
            check_frames(&layout, rest);
        }
        return;
    }
    let Some(layout) = Layout::of_version(Version::three(version)) else { return };
    check_frames(&layout, rest);
    let Some((address, rest)) = rest.split_first_chunk::<8>() else { return };
    let address = u64::from_le_bytes(*address);
    let memory = Pieces::parse(rest);
    // As the BPF programs see it.
    let at = |place: u32| memory.word(address.wrapping_add(place.into()));
    let identity = layout.process.code_identity;
    let words = [at(identity), at(identity + 8), at(identity + 16), at(identity + 24)];
    let ([Some(file), Some(name), Some(other), Some(last)], Some(line)) = (words, at(layout.process.code_first_line))
    else {
        return;
    };
    let expected = identity_of([file, name, other, last], line as u32);
    let Ok(code) = Code::read(&memory, &layout, address, expected) else { return };
    assert!(code.name.len() <= LONGEST_NAME && code.file.len() <= LONGEST_NAME);
    assert!(Code::read(&memory, &layout, address, expected.wrapping_add(1)).is_err());
    for offset in [0, 8, 100, u32::MAX] {
        assert_ne!(code.line(&layout, offset), Some(0));
    }
}

/// Checks frames as the BPF programs deliver them: none is in two invocations, and their order is kept.
fn check_frames(layout: &Layout, data: &[u8]) {
    let frame = |bytes: &[u8]| {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        PythonFrame { code: word(0), check: word(8), instruction: word(16) as u32, flags: (word(16) >> 32) as u32 }
    };
    let frames: Vec<PythonFrame> = data.chunks_exact(FRAME_BYTES).map(frame).collect();
    for is_whole in [true, false] {
        let divided = invocations(layout, &frames, is_whole);
        let mut left = frames.iter();
        for found in divided.iter().flatten() {
            assert!(left.any(|raw| raw.code == found.code && raw.check == found.check));
            let _ = found.is_shown(layout, 3);
        }
    }
}
