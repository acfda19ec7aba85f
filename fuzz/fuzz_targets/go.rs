//! A Go program's file, function table and heap profile.
#![cfg_attr(fuzzing, no_main)]

#[macro_use]
#[path = "../shared/target.rs"]
mod target;
#[path = "../shared/go.rs"]
mod shared;

fuzz_target!(shared::check);
