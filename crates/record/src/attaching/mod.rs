//! Attaches probes where targets allocate: at the start, and as processes fork, exec and map new files.

mod announcements;
pub mod arenas;
pub mod audit;
mod breaker;
pub mod command;
mod cpu_time;
mod executed;
pub mod follow;
mod membership;
pub mod missed;
mod modules;
mod objects;
mod others;
pub mod probes;
pub mod runtimes;
pub mod start;
pub mod taking_in;
pub mod targets;
