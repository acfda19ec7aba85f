//! The cost of unwinding one copied stack.

use crate::context::Context;

/// One-line description of the benchmark.
pub const ABOUT: &str = "ns to unwind stacks of 8 to 512 frames: cold, with warm rules, repeated (JSON objects)";

/// Runs the benchmark; it takes no arguments.
pub fn run(context: &Context, args: &[String]) -> anyhow::Result<()> {
    super::run_program(context, "heapbpf-bench-unwind", args)
}
