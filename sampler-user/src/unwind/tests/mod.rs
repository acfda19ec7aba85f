//! Unwinding of this process's own stacks against known truths.

mod compiled;
mod hostile;
mod plain;
mod programs;
