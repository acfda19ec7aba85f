//! `cargo xtask soak`: a long recording of a mixed load. It is a test in `tests/tests/alone/long/soak.rs`.

use std::ffi::OsStr;

use clap::Args;

use crate::context::Context;
use crate::test;

/// How long.
#[derive(Args, Debug)]
pub struct Selection {
    /// Minutes of recording
    #[arg(long, value_name = "N", default_value = "60")]
    minutes: f64,
    /// Seconds between two samples
    #[arg(long, value_name = "N", default_value = "5")]
    every: f64,
}

/// Runs it, and shows what was measured. Fails if memory grows or estimates drift.
pub fn soak(context: &Context, selection: &Selection) -> anyhow::Result<()> {
    let (minutes, every) = (selection.minutes.to_string(), selection.every.to_string());
    let variables = [("HEAPBPF_SOAK_MINUTES", OsStr::new(&minutes)), ("HEAPBPF_SOAK_EVERY", OsStr::new(&every))];
    test::bench_among_tests(context, ["alone", "long::soak::"], &variables)
}
