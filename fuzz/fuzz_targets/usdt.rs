//! USDT probes that a file announces: every site is within the file.
#![cfg_attr(fuzzing, no_main)]

#[macro_use]
#[path = "../shared/target.rs"]
mod target;
#[path = "../shared/usdt.rs"]
mod shared;

fuzz_target!(shared::check);
