//! The table of CPython's object allocator in a file.
#![cfg_attr(fuzzing, no_main)]

#[path = "../shared/objects.rs"]
mod shared;

heapbpf_fuzz::fuzz_target!(shared::check);
