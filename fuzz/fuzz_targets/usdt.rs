//! USDT probes that a file announces: every site is within the file.
#![cfg_attr(fuzzing, no_main)]

#[path = "../shared/usdt.rs"]
mod shared;

heapbpf_fuzz::fuzz_target!(shared::check);
