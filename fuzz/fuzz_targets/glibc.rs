//! glibc's arenas in the memory of a process.
#![cfg_attr(fuzzing, no_main)]

#[path = "../shared/glibc.rs"]
mod shared;

heapbpf_fuzz::fuzz_target!(shared::check);
