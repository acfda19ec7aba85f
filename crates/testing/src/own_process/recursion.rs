//! Captures at the bottom of a recursion of known depth.

use std::sync::Arc;

use heapbpf_unwind::dwarf::{Limits, Unwinder};
use heapbpf_unwind::raw::RawStack;

use super::{OwnCapture, OwnProcess, capture_here, take_capture};

/// Captures at the bottom of `depth` further calls.
#[inline(never)]
pub fn descend(depth: u32) -> u32 {
    if depth == 0 {
        capture_here();
        return 0;
    }
    std::hint::black_box(descend(depth - 1)) + 1
}

/// Returns the capture at the bottom of `depth` further calls.
///
/// # Panics
/// If `/proc` cannot be read.
pub fn captured(depth: u32) -> OwnCapture {
    descend(depth);
    take_capture().expect("a stack in /proc")
}

/// Unwinds a capture of this process with a new unwinder.
pub fn unwind(process: &OwnProcess, capture: &OwnCapture) -> Arc<RawStack> {
    let mut unwinder = Unwinder::new(Limits::default(), process.address_bits());
    unwinder.unwind(&mut process.clone(), &process.space(), capture.input())
}
