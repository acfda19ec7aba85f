//! glibc's arenas in the memory of a process.
#![cfg_attr(fuzzing, no_main)]

#[macro_use]
#[path = "../shared/target.rs"]
mod target;
#[path = "../shared/glibc.rs"]
mod shared;

fuzz_target!(shared::check);
