//! The plan of inline hooks for any code, and a blob's memory with any content.
#![cfg_attr(fuzzing, no_main)]

#[path = "../shared/inline_plan.rs"]
mod shared;

heapbpf_fuzz::fuzz_target!(shared::check);
