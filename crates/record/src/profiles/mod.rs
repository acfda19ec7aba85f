//! Profiles of a running recording: a snapshot of its sums, then symbolization and estimates in the profile worker.

pub mod accounting;
pub mod capture;
pub mod describe;
pub mod go_heaps;
mod in_memory;
pub mod jit_code;
mod memory;
pub mod overflow_bucket;
pub mod recent;
pub mod requests;
pub mod snapshot;
pub mod symbolization;
pub mod worker;
