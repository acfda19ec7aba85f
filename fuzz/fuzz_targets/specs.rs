//! Descriptions of allocators, as `--alloc` takes them.
#![no_main]

#[path = "../shared/specs.rs"]
mod shared;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| shared::check(data));
