//! The injector against running programs: needs root and a C compiler.

#![cfg(target_arch = "x86_64")]

mod calls;
mod cycles;
mod entry;
mod kills;
mod limits;
mod long;
mod places;
mod probes;
mod program;
mod refusals;
mod reused;
mod words;
