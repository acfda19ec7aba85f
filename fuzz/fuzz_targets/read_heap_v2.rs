//! The profile reader, on text of jemalloc and gperftools.
#![cfg_attr(fuzzing, no_main)]

#[path = "../shared/read.rs"]
mod shared;

heapbpf_fuzz::fuzz_target!(shared::check);
