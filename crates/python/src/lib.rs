//! CPython's frames as data: where each version of the interpreter keeps them ([`layout`]), which version a file has
//! ([`runtime`]), and what a code object says ([`code`], [`lines`]).
//!
//! Everything is read from files and from the memory of processes that may be hostile: reads are bounded, and what they
//! find is checked.

#![forbid(unsafe_code)]

pub mod code;
mod cold;
mod debug_offsets;
pub mod frames;
pub mod layout;
pub mod lines;
pub mod runtime;
mod symbols;
mod unsupported;
pub mod version;

pub use code::{Code, Memory};
pub use frames::{Frame, Invocation, invocations};
pub use layout::Layout;
pub use runtime::Runtime;
pub use unsupported::Unsupported;
pub use version::Version;
