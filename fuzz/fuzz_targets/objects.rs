//! The table of CPython's object allocator in a file.
#![cfg_attr(fuzzing, no_main)]

#[macro_use]
#[path = "../shared/target.rs"]
mod target;
#[path = "../shared/objects.rs"]
mod shared;

fuzz_target!(shared::check);
