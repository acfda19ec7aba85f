//! Request parameters and token files: scopes hold.
#![cfg_attr(fuzzing, no_main)]

#[macro_use]
#[path = "../shared/target.rs"]
mod target;
#[path = "../shared/requests.rs"]
mod shared;

fuzz_target!(shared::check);
