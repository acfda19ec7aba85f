//! Parameters of requests and files of tokens: a scope holds.
#![cfg_attr(fuzzing, no_main)]

#[macro_use]
#[path = "../shared/target.rs"]
mod target;
#[path = "../shared/requests.rs"]
mod shared;

fuzz_target!(shared::check);
