//! Walks a stack in a module. The fuzzer controls registers, stack and file.
#![cfg_attr(fuzzing, no_main)]

#[path = "../shared/unwind.rs"]
mod shared;

heapbpf_fuzz::fuzz_target!(shared::check);
