//! What probes cost on this very machine, measured on a process of our own; and the budget that they are kept in.

pub mod budget;
pub mod cpu_time;
pub mod cpus;
pub mod free_groups;
pub mod library;
pub mod measure;
pub mod quantiles;
mod specimens;
pub mod trial;
pub mod workload;
