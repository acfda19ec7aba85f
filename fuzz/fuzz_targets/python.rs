//! CPython's code objects, lines, frames and its own description.
#![no_main]

#[path = "../shared/python.rs"]
mod shared;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| shared::check(data));
