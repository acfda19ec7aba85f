//! ELF headers and the notes with the build ID.
#![no_main]

#[path = "../shared/build_id.rs"]
mod shared;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| shared::check(data));
