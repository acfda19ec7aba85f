//! Demangling of any symbol name.
#![cfg_attr(fuzzing, no_main)]

#[macro_use]
#[path = "../shared/target.rs"]
mod target;
#[path = "../shared/demangle.rs"]
mod shared;

fuzz_target!(shared::check);
