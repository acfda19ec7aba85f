//! The table of CPython's object allocator in a file.
#![no_main]

#[path = "../shared/objects.rs"]
mod shared;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| shared::check(data));
