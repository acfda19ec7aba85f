//! Walks a stack in a module. The fuzzer controls registers, stack and file.

use std::cell::RefCell;
use std::sync::Arc;

use heapbpf_unwind::dwarf::{Capture, Flaws, Unwinder};
use heapbpf_unwind::mapping::ModuleId;
use heapbpf_unwind::raw::SpaceView;
use heapbpf_unwind::{ProcessKey, Registers};

#[path = "one_module.rs"]
mod one_module;

use one_module::{BASE, OneModule};

thread_local! {
    /// One unwinder for all inputs, and the number of inputs: creating its caches of 3 MiB takes longer than a walk.
    /// Each input is another module with another generation of the mappings, so that it hits no cache entry of an
    /// earlier one.
    static UNWINDER: RefCell<(Unwinder, u32)> = RefCell::default();
}

/// Checks an input: the instruction pointer in the file, the frame pointer's distance from the stack pointer, and the
/// length of the stack (two bytes each), then the stack, then the file.
pub fn check(data: &[u8]) {
    let Some((head, rest)) = data.split_first_chunk::<6>() else { return };
    let [ip, fp, length] = [0, 2, 4].map(|at| u16::from_le_bytes([head[at], head[at + 1]]));
    let (stack, module) = rest.split_at(usize::from(length).min(rest.len()));
    UNWINDER.with_borrow_mut(|(unwinder, inputs)| {
        *inputs = inputs.wrapping_add(1);
        walk_twice(unwinder, *inputs, [ip, fp], stack, module);
        unwinder.drop_unused();
    });
}

fn walk_twice(unwinder: &mut Unwinder, input: u32, [ip, fp]: [u16; 2], stack: &[u8], module: &[u8]) {
    let mut module = OneModule(ModuleId(input), Arc::new(module.to_vec()));
    let mappings = module.mappings();
    let space = SpaceView { key: ProcessKey::default(), generation: Some(input.into()), mappings: &mappings };
    let sp = 0x7fff_0000_0000;
    let registers = Registers { ip: BASE + u64::from(ip), sp, fp: sp + u64::from(fp), lr: 0 };
    let capture = Capture { registers: &registers, stack: stack.into(), in_flight: &[], flaws: Flaws::default() };
    let first = unwinder.unwind(&mut module, &space, capture);
    assert!(!first.frames.is_empty() && first.frames.len() <= 512);
    assert_eq!(first, unwinder.unwind(&mut module, &space, capture), "a repeated stack is the same");
}
