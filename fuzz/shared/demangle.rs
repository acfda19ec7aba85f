//! Demangling of any symbol name.

use sampler_user::symbols::demangle::demangle;

/// Checks a name.
pub fn check(data: &[u8]) {
    let Ok(name) = std::str::from_utf8(data) else { return };
    let _ = demangle(name);
    let _ = demangle(&format!("_Z{name}"));
    let _ = demangle(&format!("_R{name}"));
}
