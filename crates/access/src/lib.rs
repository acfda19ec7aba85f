//! Who may read which profiles: the parameters of a request, the filter that they make, and tokens with their scopes.

// These macros panic if their reader has closed the pipe.
#![warn(clippy::print_stderr, clippy::print_stdout)]

pub mod filter;
pub mod parameters;
pub mod tokens;

#[cfg(test)]
mod fuzzed;

// The code shared with the fuzz targets refers to the crate by name.
#[cfg(test)]
extern crate self as heapbpf_access;
