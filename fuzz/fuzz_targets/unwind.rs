//! The walk over a stack in a module: registers, stack and file are all the fuzzer's.
#![cfg_attr(fuzzing, no_main)]

#[macro_use]
#[path = "../shared/target.rs"]
mod target;
#[path = "../shared/unwind.rs"]
mod shared;

fuzz_target!(shared::check);
