//! The plan of inline hooks for any code, and a blob's memory with any content.
#![no_main]

#[path = "../shared/inline_plan.rs"]
mod shared;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| shared::check(data));
