//! Records of both rings: decoded data is within the record.
#![cfg_attr(fuzzing, no_main)]

#[path = "../shared/records.rs"]
mod shared;

heapbpf_fuzz::fuzz_target!(shared::check);
