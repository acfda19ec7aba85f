//! Who may read which profiles: the parameters of a request, the filter that they make, and tokens with their scopes.

// They panic if nobody reads what they print.
#![warn(clippy::print_stderr, clippy::print_stdout)]

pub mod filter;
pub mod parameters;
pub mod tokens;

#[cfg(test)]
mod fuzzed;

// What is shared with fuzz targets names the crate.
#[cfg(test)]
extern crate self as heapbpf_access;
