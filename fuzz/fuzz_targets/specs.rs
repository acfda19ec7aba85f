//! Descriptions of allocators, as `--alloc` takes them.
#![cfg_attr(fuzzing, no_main)]

#[path = "../shared/specs.rs"]
mod shared;

heapbpf_fuzz::fuzz_target!(shared::check);
