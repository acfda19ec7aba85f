//! The plan of inline hooks for any code, and a blob's memory with any content.
#![cfg_attr(fuzzing, no_main)]

#[macro_use]
#[path = "../shared/target.rs"]
mod target;
#[path = "../shared/inline_plan.rs"]
mod shared;

fuzz_target!(shared::check);
