//! What a fleet costs its stores.

use crate::context::Context;

/// What it measures.
pub const ABOUT: &str = "a fleet of synthetic hosts: bytes per profile in each format, series, how hosts add up";

/// Runs it; takes no arguments.
pub fn run(context: &Context, args: &[String]) -> anyhow::Result<()> {
    super::run_program(context, "heapbpf-bench-fleet", args)
}
