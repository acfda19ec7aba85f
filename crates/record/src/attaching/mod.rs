//! Attaches probes where targets allocate: at the start, and as processes fork, exec and map new files.

mod announcements;
pub mod arenas;
pub mod audit;
mod breaker;
pub mod command;
pub mod follow;
pub mod go;
mod idle;
mod interpreters;
mod java;
mod mapped;
mod membership;
pub mod missed;
mod modules;
mod objects;
mod others;
mod others_hooks;
pub mod probes;
mod python;
mod refusals;
pub mod start;
pub mod taking_in;
pub mod targets;
