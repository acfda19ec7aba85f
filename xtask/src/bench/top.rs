//! `cargo xtask bench top`: what the live view costs.

use crate::context::Context;
use crate::test;

pub const ABOUT: &str =
    "heapbpf top over 5,000 stacks: CPU time as a share of a core, beside a recording without a screen";

pub fn run(context: &Context, _: &[String]) -> anyhow::Result<()> {
    test::bench_among_tests(context, ["company", "top::"], &[])
}
