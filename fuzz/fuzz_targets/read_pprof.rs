//! The profile reader, on pprof messages.
#![cfg_attr(fuzzing, no_main)]

#[path = "../shared/read.rs"]
mod shared;

heapbpf_fuzz::fuzz_target!(shared::check);
