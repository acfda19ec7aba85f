//! Reads HotSpot, the virtual machine of OpenJDK: which file contains it and how it describes itself
//! ([`description`], [`layout`]), which code is at an address ([`code`]), how to unwind a frame of that code
//! ([`frames`]), and which Java methods it runs ([`scopes`], [`method`]).
//!
//! Everything is read from files and process memory that may be hostile: reads are bounded, and the results are
//! checked. Nothing is executed or loaded into the process, because a JVM exports tables of its own structures.

#![forbid(unsafe_code)]

pub mod code;
pub mod description;
pub mod frames;
#[cfg(test)]
mod fuzzed;
pub mod layout;
pub mod memory;
pub mod method;
pub mod scopes;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

// Code shared with fuzz targets refers to the crate by name.
#[cfg(test)]
extern crate self as heapbpf_java;

pub use code::{Blob, Kind};
pub use description::{Library, Tables};
pub use heapbpf_elf::Memory;
pub use layout::Vm;
pub use memory::{ReadError, Unsupported};
pub use method::Method;
pub use scopes::Scope;
