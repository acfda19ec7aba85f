//! Demangling of any symbol name.

use heapbpf_symbols::demangle::demangle;

/// Longest C++ name in bytes. Parsing a name takes time that grows exponentially with its length, so a recording does
/// it in a helper process that the kernel ends.
const MOST_CPP_BYTES: usize = 40;

/// Checks a name.
pub fn check(data: &[u8]) {
    let Ok(name) = std::str::from_utf8(data) else { return };
    if name.len() <= MOST_CPP_BYTES {
        let _ = demangle(name);
        let _ = demangle(&format!("_Z{name}"));
    }
    let _ = demangle(&format!("_R{name}"));
}
