//! The cost and benefit of the statistics, and how often confidence intervals contain the truth.

use crate::context::Context;

/// One-line description of [`coverage`].
pub const ABOUT_COVERAGE: &str =
    "coverage of the intervals: 18 mixes of sizes, 20,000 profiles a cell ([PROFILES [SEEDS]])";
/// One-line description of [`real_coverage`].
pub const ABOUT_REAL_COVERAGE: &str =
    "coverage of the intervals of 480 short runs with known truth, through real probes";
/// One-line description of [`growth`].
pub const ABOUT_GROWTH: &str =
    "false discoveries of `heapbpf diff` in 120 pairs of equal runs of real programs, and how large a leak it finds";
/// One-line description of [`statistics`].
pub const ABOUT_STATISTICS: &str =
    "weights, intervals and p-values of 100,000 stacks; a draw; calibration; the growth test";

/// Runs the benchmark.
pub fn coverage(context: &Context, args: &[String]) -> anyhow::Result<()> {
    super::run_program(context, "heapbpf-coverage", args)
}

/// Runs the benchmark; arguments select parts: `speed`, `draw`, `calibration`, `growth`.
pub fn statistics(context: &Context, args: &[String]) -> anyhow::Result<()> {
    super::run_program(context, "heapbpf-bench-statistics", args)
}

/// Runs the benchmark; it takes no arguments.
pub fn real_coverage(context: &Context, _args: &[String]) -> anyhow::Result<()> {
    crate::test::bench_among_tests(context, ["alone", "long::coverage::"], &[])
}

/// Runs the benchmark; it takes no arguments.
pub fn growth(context: &Context, _args: &[String]) -> anyhow::Result<()> {
    crate::test::bench_among_tests(context, ["alone", "long::growth::"], &[])
}
