//! HotSpot's own description, code heaps, frames and methods: walks go up, and what is read is bounded.
#![no_main]

#[path = "../shared/java.rs"]
mod shared;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| shared::check(data));
