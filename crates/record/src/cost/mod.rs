//! What probes cost on this machine, measured on a child process, and the rules that keep them within a budget.

pub mod budget;
pub mod cpu_time;
pub mod cpus;
pub mod library;
pub mod measure;
pub mod trial;
pub mod workload;
