//! Turns events into the sums of each stack.

// They panic if nobody reads what they print.
#![warn(clippy::print_stderr, clippy::print_stdout)]

pub mod ages;
pub mod event;
#[cfg(test)]
mod fuzzed;
pub mod live;
mod mapped;
pub mod sample;

// What is shared with fuzz targets names the crate.
#[cfg(test)]
extern crate self as heapbpf_heap;
