//! A Go program's file, table of functions and heap profile.
#![no_main]

#[path = "../shared/go.rs"]
mod shared;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| shared::check(data));
