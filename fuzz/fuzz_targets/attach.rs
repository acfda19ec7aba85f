//! The plan of probe sites for a file: every site lies in the file.
#![no_main]

#[path = "../shared/attach.rs"]
mod shared;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| shared::check(data));
