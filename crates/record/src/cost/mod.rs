//! What probes cost on this machine, measured on a child process.

pub mod cpu_time;
pub mod cpus;
pub mod library;
pub mod measure;
pub mod probe_costs;
pub mod trial;
pub mod workload;
