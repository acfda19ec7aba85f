//! Call frame information: every address of a module has a rule, in bounded time.
#![cfg_attr(fuzzing, no_main)]

#[path = "../shared/unwind_information.rs"]
mod shared;

heapbpf_fuzz::fuzz_target!(shared::check);
