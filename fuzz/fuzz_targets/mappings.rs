//! `/proc/PID/maps`, and the kernel's records of processes and mappings: mappings never overlap.
#![cfg_attr(fuzzing, no_main)]

#[macro_use]
#[path = "../shared/target.rs"]
mod target;
#[path = "../shared/mappings.rs"]
mod shared;

fuzz_target!(shared::check);
