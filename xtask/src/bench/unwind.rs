//! What it costs to unwind one copied stack.

use crate::context::Context;

/// What it measures.
pub const ABOUT: &str = "ns to unwind a stack of 70 frames: cold, with warm rules, repeated (one JSON object)";

/// Runs it; it takes no arguments.
pub fn run(context: &Context, args: &[String]) -> anyhow::Result<()> {
    super::run_program(context, "heapbpf-bench-unwind", args)
}
