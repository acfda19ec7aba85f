//! ELF headers and the notes with the build ID.
#![cfg_attr(fuzzing, no_main)]

#[path = "../shared/build_id.rs"]
mod shared;

heapbpf_fuzz::fuzz_target!(shared::check);
