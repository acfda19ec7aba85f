//! Walks a stack in a module. The fuzzer controls registers, stack and file.
#![cfg_attr(fuzzing, no_main)]

#[macro_use]
#[path = "../shared/target.rs"]
mod target;
#[path = "../shared/unwind.rs"]
mod shared;

fuzz_target!(shared::check);
