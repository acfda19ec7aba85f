//! Symbolization: functions, files, lines and inlined calls for raw stacks, in batches and off the event path.
//!
//! [`symbolizer::Symbolizer`] symbolizes (module, file offset) pairs. [`finish::Finisher`] turns raw stacks into
//! profile stacks with these symbols and those of [`perf_map`]s. [`offline`] symbolizes saved profiles. Files that
//! belong to a target are read within bounds and never mapped; debug files in the administrator's directories are
//! trusted.

// These macros panic if their reader has closed the pipe.
#![warn(clippy::print_stderr, clippy::print_stdout)]

mod bounded_names;
pub mod by_build_id;
pub mod debug_files;
pub mod debuginfod;
pub mod demangle;
pub mod finish;
#[cfg(test)]
mod fuzzed;
pub mod go;
pub mod http_client;
pub mod java;
pub mod linked_dwarf;
mod nesting;
pub mod offline;
pub mod options;
pub mod packages;
pub mod perf_map;
pub mod progress;
pub mod reasons;
pub mod runtime_functions;
pub mod sparse_copy;
pub mod symbolizer;

#[cfg(test)]
mod linked_tests;
#[cfg(test)]
mod tests;

// The code shared with the fuzz targets refers to the crate by name.
#[cfg(test)]
extern crate self as heapbpf_symbols;
