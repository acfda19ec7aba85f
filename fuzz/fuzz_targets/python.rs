//! CPython's code objects, line tables, frames and its own table of offsets.
#![cfg_attr(fuzzing, no_main)]

#[macro_use]
#[path = "../shared/target.rs"]
mod target;
#[path = "../shared/python.rs"]
mod shared;

fuzz_target!(shared::check);
