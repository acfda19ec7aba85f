//! USDT probes that a file announces: every site lies in the file.
#![no_main]

#[path = "../shared/usdt.rs"]
mod shared;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| shared::check(data));
