//! The profile reader, on Parquet files.
#![cfg_attr(fuzzing, no_main)]

#[path = "../shared/read.rs"]
mod shared;

heapbpf_fuzz::fuzz_target!(shared::check);
