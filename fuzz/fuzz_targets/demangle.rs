//! Demangling of any symbol name.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sampler_user::symbols::demangle::demangle;

fuzz_target!(|name: &str| {
    let _ = demangle(name);
    let _ = demangle(&format!("_Z{name}"));
    let _ = demangle(&format!("_R{name}"));
});
