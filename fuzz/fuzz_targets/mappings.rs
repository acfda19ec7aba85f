//! `/proc/PID/maps`, and the kernel's records of processes and mappings: mappings never overlap.
#![no_main]

#[path = "../shared/mappings.rs"]
mod shared;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| shared::check(data));
