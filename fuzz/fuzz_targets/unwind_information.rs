//! Call frame information: every address of a module has a rule, in bounded time.
#![no_main]

#[path = "../shared/unwind_information.rs"]
mod shared;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| shared::check(data));
