//! The command line: what the user writes (`args`), and the plan made from it (`plan`).

pub mod allocators;
pub mod args;
pub mod census;
pub mod compare;
pub mod doctor;
#[cfg(test)]
mod documented;
pub mod error;
pub mod frames;
pub mod hints;
pub mod log;
pub mod manual;
pub mod pictures;
pub mod pipelines;
pub mod plan;
pub mod plan_command;
pub mod profiles;
pub mod read_args;
pub mod record_args;
pub mod report;
pub mod report_products;
pub mod targets;
pub mod top;
pub mod values;
