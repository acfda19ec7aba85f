//! Request parameters and token files: scopes hold.
#![cfg_attr(fuzzing, no_main)]

#[path = "../shared/requests.rs"]
mod shared;

heapbpf_fuzz::fuzz_target!(shared::check);
