//! Reads CPython's frames: where each version of the interpreter stores them ([`layout`]), which version a file
//! contains ([`runtime`]), and what a code object says ([`code`], [`lines`]).
//!
//! Everything is read from files and process memory that may be hostile: reads are bounded, and the results are
//! checked.

#![forbid(unsafe_code)]

pub mod code;
pub mod debug_offsets;
pub mod frames;
#[cfg(test)]
mod fuzzed;
pub mod layout;
pub mod lines;
pub mod runtime;
pub mod version;

// Code shared with fuzz targets refers to the crate by name.
#[cfg(test)]
extern crate self as heapbpf_python;

pub use code::{Code, Memory};
pub use frames::{Frame, Invocation, invocations};
pub use layout::Layout;
pub use runtime::Runtime;
pub use version::{Unsupported, Version};
