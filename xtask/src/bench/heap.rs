//! What the daemon's own copy of the heap takes.

use crate::context::Context;

/// What it measures.
pub const ABOUT: &str = "memory of 1,000 to 1,000,000 tracked live samples in the daemon, and ns per sample and free";

/// Runs it; it takes no arguments.
pub fn run(context: &Context, args: &[String]) -> anyhow::Result<()> {
    super::run_program(context, "heapbpf-bench-heap", args)
}
