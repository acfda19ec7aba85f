//! CPython's code objects, lines, frames and its own description.
#![cfg_attr(fuzzing, no_main)]

#[macro_use]
#[path = "../shared/target.rs"]
mod target;
#[path = "../shared/python.rs"]
mod shared;

fuzz_target!(shared::check);
