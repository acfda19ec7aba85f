//! The reader of profiles, from heapbpf's JSON.
#![no_main]

#[path = "../shared/read.rs"]
mod shared;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| shared::check(data));
