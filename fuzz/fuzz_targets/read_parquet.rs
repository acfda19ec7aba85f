//! The reader of profiles, from Parquet files.
#![no_main]

#[path = "../shared/read.rs"]
mod shared;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| shared::check(data));
