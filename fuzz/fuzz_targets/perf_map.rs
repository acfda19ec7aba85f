//! Perf maps: the limits on entries and names hold.
#![cfg_attr(fuzzing, no_main)]

#[path = "../shared/perf_map.rs"]
mod shared;

heapbpf_fuzz::fuzz_target!(shared::check);
