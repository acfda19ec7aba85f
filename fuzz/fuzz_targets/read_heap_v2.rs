//! The reader of profiles, from text of jemalloc and gperftools.
#![no_main]

#[path = "../shared/read.rs"]
mod shared;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| shared::check(data));
