//! The walk over a stack in a module: registers, stack and file are all the fuzzer's.
#![no_main]

mod one_module;

use std::sync::Arc;

use heapbpf_unwind::dwarf::{Capture, Flaws, Unwinder};
use heapbpf_unwind::raw::SpaceView;
use heapbpf_unwind::{ProcessKey, Registers};
use libfuzzer_sys::fuzz_target;
use one_module::{BASE, OneModule};

fuzz_target!(|input: (u16, u16, Vec<u8>, Vec<u8>)| {
    let (ip, fp, stack, module) = input;
    let mut module = OneModule(Arc::new(module));
    let mappings = module.mappings();
    let space = SpaceView { key: ProcessKey::default(), generation: Some(0), mappings: &mappings };
    let sp = 0x7fff_0000_0000;
    let registers = Registers { ip: BASE + u64::from(ip), sp, fp: sp + u64::from(fp), lr: 0 };
    let mut unwinder = Unwinder::default();
    let capture = Capture { registers: &registers, stack: &stack, in_flight: &[], flaws: Flaws::default() };
    let first = unwinder.unwind(&mut module, &space, capture);
    assert!(!first.frames.is_empty() && first.frames.len() <= 512);
    assert_eq!(first, unwinder.unwind(&mut module, &space, capture), "a repeated stack is the same");
});
