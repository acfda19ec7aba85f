//! HotSpot's own tables, code heaps, frames and methods: walks go up, and what is read is bounded.
#![cfg_attr(fuzzing, no_main)]

#[path = "../shared/java.rs"]
mod shared;

heapbpf_fuzz::fuzz_target!(shared::check);
