//! Aggregates events into sums per stack.

// These macros panic if the output has no reader.
#![warn(clippy::print_stderr, clippy::print_stdout)]

pub mod ages;
pub mod event;
#[cfg(test)]
mod fuzzed;
pub mod live;
mod mapped;
pub mod sample;

// Code shared with fuzz targets refers to the crate by name.
#[cfg(test)]
extern crate self as heapbpf_heap;
