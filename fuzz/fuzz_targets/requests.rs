//! Parameters of requests and files of tokens: a scope holds.
#![no_main]

#[path = "../shared/requests.rs"]
mod shared;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| shared::check(data));
