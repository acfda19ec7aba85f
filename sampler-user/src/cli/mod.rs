//! The command line: what the user wrote (`args`), and what will be done (`plan`).

pub mod allocators;
pub mod args;
pub mod compare;
pub mod doctor;
#[cfg(test)]
mod documented;
pub mod hints;
pub mod log;
pub mod pipelines;
pub mod plan;
pub mod preview;
pub mod read_args;
pub mod report;
pub mod targets;
pub mod values;
