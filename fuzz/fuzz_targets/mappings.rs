//! `/proc/PID/maps`, and the kernel's records of processes and mappings: mappings never overlap.
#![cfg_attr(fuzzing, no_main)]

#[path = "../shared/mappings.rs"]
mod shared;

heapbpf_fuzz::fuzz_target!(shared::check);
