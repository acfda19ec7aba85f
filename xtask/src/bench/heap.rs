//! The memory that the daemon's live-sample tracking takes.

use crate::context::Context;

/// One-line description of the benchmark.
pub const ABOUT: &str = "memory of 1,000 to 1,000,000 tracked live samples in the daemon, and ns per sample and free";

/// Runs the benchmark; it takes no arguments.
pub fn run(context: &Context, args: &[String]) -> anyhow::Result<()> {
    super::run_program(context, "heapbpf-bench-heap", args)
}
