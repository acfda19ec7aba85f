//! Perf maps: the limits on entries and names hold.
#![no_main]

#[path = "../shared/perf_map.rs"]
mod shared;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| shared::check(data));
