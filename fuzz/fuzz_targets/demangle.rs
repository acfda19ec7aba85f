//! Demangling of any symbol name.
#![cfg_attr(fuzzing, no_main)]

#[path = "../shared/demangle.rs"]
mod shared;

heapbpf_fuzz::fuzz_target!(shared::check);
