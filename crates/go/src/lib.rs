//! Reads Go's heap profile. A Go program samples its own heap and records, for each call stack and size, how many
//! sampled objects were allocated and freed ([`buckets`]). This crate finds these records in the memory of a running
//! process without its help ([`program`], [`heap`]), and names functions with the table that every Go program has
//! ([`functions`]).
//!
//! Everything is read from files and process memory that may be hostile: reads are bounded, lists end, and the results
//! are checked.

#![forbid(unsafe_code)]

pub mod buckets;
pub mod functions;
pub mod heap;
pub mod memory;
pub mod program;
pub mod version;

#[cfg(test)]
mod fuzzed;
#[cfg(test)]
mod testing;

// Code shared with fuzz targets refers to the crate by name.
#[cfg(test)]
extern crate self as heapbpf_go;

pub use buckets::{Bucket, Moments};
pub use functions::{Function, Functions, Places};
pub use heap::Heap;
pub use heapbpf_elf::Memory;
pub use program::Program;
pub use version::{Layout, Unread, Unsupported, Version};
