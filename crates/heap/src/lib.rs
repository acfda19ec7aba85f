//! Turns events into the sums of each stack.

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
