//! Symbol tables and debug information of a module: every address gets a name or a reason.
#![no_main]

#[path = "../shared/symbols.rs"]
mod shared;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| shared::check(data));
