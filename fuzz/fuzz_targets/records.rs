//! Records of both rings: decoded data is within the record.
#![cfg_attr(fuzzing, no_main)]

#[macro_use]
#[path = "../shared/target.rs"]
mod target;
#[path = "../shared/records.rs"]
mod shared;

fuzz_target!(shared::check);
