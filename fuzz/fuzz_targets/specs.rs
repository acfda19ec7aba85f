//! Descriptions of allocators, as `--alloc` takes them.
#![cfg_attr(fuzzing, no_main)]

#[macro_use]
#[path = "../shared/target.rs"]
mod target;
#[path = "../shared/specs.rs"]
mod shared;

fuzz_target!(shared::check);
