//! The cost of a fleet's profiles and metrics to its stores.

use crate::context::Context;

/// One-line description of the benchmark.
pub const ABOUT: &str = "a fleet of synthetic hosts: bytes per profile in each format, series, how hosts add up";

/// Runs the benchmark; it takes no arguments.
pub fn run(context: &Context, args: &[String]) -> anyhow::Result<()> {
    super::run_program(context, "heapbpf-bench-fleet", args)
}
