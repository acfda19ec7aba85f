//! The profile reader, on heapbpf's JSON.
#![cfg_attr(fuzzing, no_main)]

#[path = "../shared/read.rs"]
mod shared;

heapbpf_fuzz::fuzz_target!(shared::check);
