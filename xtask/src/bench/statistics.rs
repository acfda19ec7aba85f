//! What the mathematics costs and gains, and how often its intervals hold the truth.

use crate::context::Context;

/// What [`coverage`] measures.
pub const ABOUT_COVERAGE: &str =
    "coverage of the intervals: 18 mixes of sizes, 20,000 profiles a cell ([PROFILES [SEEDS]])";
/// What [`real_coverage`] measures.
pub const ABOUT_REAL_COVERAGE: &str =
    "coverage of the intervals of 480 short runs with known truth, through real probes";
/// What [`growth`] measures.
pub const ABOUT_GROWTH: &str =
    "false discoveries of `heapbpf diff` in 120 pairs of equal runs of real programs, and how large a leak it finds";
/// What [`statistics`] measures.
pub const ABOUT_STATISTICS: &str =
    "weights, intervals and p-values of 100,000 stacks; a draw; calibration; the growth test";

/// Runs it.
pub fn coverage(context: &Context, args: &[String]) -> anyhow::Result<()> {
    super::run_program(context, "heapbpf-coverage", args)
}

/// Runs it; arguments name the parts wanted: `speed`, `draw`, `calibration`, `growth`.
pub fn statistics(context: &Context, args: &[String]) -> anyhow::Result<()> {
    super::run_program(context, "heapbpf-bench-statistics", args)
}

/// Runs it; takes no arguments.
pub fn real_coverage(context: &Context, _args: &[String]) -> anyhow::Result<()> {
    crate::test::bench_among_tests(context, "coverage")
}

/// Runs it; takes no arguments.
pub fn growth(context: &Context, _args: &[String]) -> anyhow::Result<()> {
    crate::test::bench_among_tests(context, "growth")
}
