//! A Go program's file, function table and heap profile.
#![cfg_attr(fuzzing, no_main)]

#[path = "../shared/go.rs"]
mod shared;

heapbpf_fuzz::fuzz_target!(shared::check);
