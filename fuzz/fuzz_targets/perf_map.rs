//! Perf maps: the limits on entries and names hold.
#![cfg_attr(fuzzing, no_main)]

#[macro_use]
#[path = "../shared/target.rs"]
mod target;
#[path = "../shared/perf_map.rs"]
mod shared;

fuzz_target!(shared::check);
