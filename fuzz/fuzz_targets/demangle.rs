//! Demangling of any symbol name.
#![no_main]

#[path = "../shared/demangle.rs"]
mod shared;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| shared::check(data));
