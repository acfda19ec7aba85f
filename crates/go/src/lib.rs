//! Go's heap profile as data. A Go program samples its own heap and keeps, for each call stack and size, how many sampled
//! objects were allocated and freed ([`buckets`]). This crate finds them in the memory of a running process without its
//! help ([`program`], [`heap`]), and names functions by the table that every Go program has ([`functions`]).
//!
//! Everything is read from files and from the memory of processes that may be hostile: reads are bounded, lists end, and
//! what is found is checked.

#![forbid(unsafe_code)]

pub mod buckets;
mod code;
pub mod functions;
pub mod heap;
pub mod memory;
pub mod program;
mod symbols;
mod unread;
pub mod version;

#[cfg(test)]
mod fuzzed;
#[cfg(test)]
mod testing;

// What is shared with fuzz targets names the crate.
#[cfg(test)]
extern crate self as heapbpf_go;

pub use buckets::{Bucket, Moments};
pub use functions::{Function, Functions, Places};
pub use heap::Heap;
pub use heapbpf_elf::Memory;
pub use program::Program;
pub use unread::{Unread, Unsupported};
pub use version::{Layout, Version};
