//! Records of both rings: what is decoded is in the record.
#![no_main]

#[path = "../shared/records.rs"]
mod shared;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| shared::check(data));
