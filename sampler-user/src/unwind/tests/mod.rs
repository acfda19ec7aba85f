//! Unwinding of this process's own stacks against known truths.

mod compiled;
pub mod hostile;
pub mod plain;
pub mod programs;
