//! The code that inline hooks run inside a target, as bytes.
//!
//! The assembler in rustc puts it into a read-only section of this program. It is position-independent and never runs
//! here: `heapbpf_inline::image` copies it into a file for a target. The code is in `blob.s`; x86-64 only.

#[cfg(target_arch = "x86_64")]
mod blob;

use heapbpf_inline::Code;

/// The code and the offsets of its entries; `None` on machines that inline hooks do not support.
#[must_use]
pub fn code() -> Option<Code<'static>> {
    #[cfg(target_arch = "x86_64")]
    return Some(blob::code());
    #[cfg(not(target_arch = "x86_64"))]
    None
}
