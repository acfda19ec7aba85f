//! CPython's code objects, line tables, frames and its own table of offsets.
#![cfg_attr(fuzzing, no_main)]

#[path = "../shared/python.rs"]
mod shared;

heapbpf_fuzz::fuzz_target!(shared::check);
