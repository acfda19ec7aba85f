//! The walk over a stack in a module: registers, stack and file are all the fuzzer's.

use std::sync::Arc;

use heapbpf_unwind::dwarf::{Capture, Flaws, Unwinder};
use heapbpf_unwind::raw::SpaceView;
use heapbpf_unwind::{ProcessKey, Registers};

#[path = "one_module.rs"]
mod one_module;

use one_module::{BASE, OneModule};

/// Checks an input: where execution is in the file, the frame pointer's distance from the stack pointer, and the length of the
/// stack, two bytes each; the stack; and the file.
pub fn check(data: &[u8]) {
    let Some((head, rest)) = data.split_first_chunk::<6>() else { return };
    let [ip, fp, length] = [0, 2, 4].map(|at| u16::from_le_bytes([head[at], head[at + 1]]));
    let (stack, module) = rest.split_at(usize::from(length).min(rest.len()));
    let mut module = OneModule(Arc::new(module.to_vec()));
    let mappings = module.mappings();
    let space = SpaceView { key: ProcessKey::default(), generation: Some(0), mappings: &mappings };
    let sp = 0x7fff_0000_0000;
    let registers = Registers { ip: BASE + u64::from(ip), sp, fp: sp + u64::from(fp), lr: 0 };
    let mut unwinder = Unwinder::default();
    let capture = Capture { registers: &registers, stack, in_flight: &[], flaws: Flaws::default() };
    let first = unwinder.unwind(&mut module, &space, capture);
    assert!(!first.frames.is_empty() && first.frames.len() <= 512);
    assert_eq!(first, unwinder.unwind(&mut module, &space, capture), "a repeated stack is the same");
}
