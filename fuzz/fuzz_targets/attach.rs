//! The plan of probe sites for a file: every site is within the file.
#![cfg_attr(fuzzing, no_main)]

#[path = "../shared/attach.rs"]
mod shared;

heapbpf_fuzz::fuzz_target!(shared::check);
