//! Call frame information: every address of a module has a rule, in bounded time.
#![cfg_attr(fuzzing, no_main)]

#[macro_use]
#[path = "../shared/target.rs"]
mod target;
#[path = "../shared/unwind_information.rs"]
mod shared;

fuzz_target!(shared::check);
