//! HotSpot's own tables, code heaps, frames and methods: walks go up, and what is read is bounded.
#![cfg_attr(fuzzing, no_main)]

#[macro_use]
#[path = "../shared/target.rs"]
mod target;
#[path = "../shared/java.rs"]
mod shared;

fuzz_target!(shared::check);
