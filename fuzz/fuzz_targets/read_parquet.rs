//! The profile reader, on Parquet files.
#![cfg_attr(fuzzing, no_main)]

#[macro_use]
#[path = "../shared/target.rs"]
mod target;
#[path = "../shared/read.rs"]
mod shared;

fuzz_target!(shared::check);
