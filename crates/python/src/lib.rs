//! CPython's frames as data: where each version of the interpreter keeps them ([`layout`]), which version a file has
//! ([`runtime`]), and what a code object says ([`code`], [`lines`]).
//!
//! Everything is read from files and from the memory of processes that may be hostile: reads are bounded, and what they
//! find is checked.

#![forbid(unsafe_code)]

pub mod code;
mod cold;
pub mod debug_offsets;
pub mod frames;
#[cfg(test)]
mod fuzzed;
pub mod layout;
pub mod lines;
pub mod runtime;
mod symbols;
mod unsupported;
pub mod version;

// What is shared with fuzz targets names the crate.
#[cfg(test)]
extern crate self as heapbpf_python;

pub use code::{Code, Memory};
pub use frames::{Frame, Invocation, invocations};
pub use layout::Layout;
pub use runtime::Runtime;
pub use unsupported::Unsupported;
pub use version::Version;
