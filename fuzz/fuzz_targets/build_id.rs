//! ELF headers and the notes with the build ID.
#![cfg_attr(fuzzing, no_main)]

#[macro_use]
#[path = "../shared/target.rs"]
mod target;
#[path = "../shared/build_id.rs"]
mod shared;

fuzz_target!(shared::check);
