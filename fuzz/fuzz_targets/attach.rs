//! The plan of probe sites for a file: every site is within the file.
#![cfg_attr(fuzzing, no_main)]

#[macro_use]
#[path = "../shared/target.rs"]
mod target;
#[path = "../shared/attach.rs"]
mod shared;

fuzz_target!(shared::check);
