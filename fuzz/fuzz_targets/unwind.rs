//! The walk over a stack in a module: registers, stack and file are all the fuzzer's.
#![no_main]

#[path = "../shared/unwind.rs"]
mod shared;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| shared::check(data));
