//! The benchmarks: one file each, and one line each in the table below.

use anyhow::bail;

use crate::context::Context;

/// A benchmark.
struct Bench {
    /// What to call it by.
    name: &'static str,
    /// What it measures, in a line.
    about: &'static str,
    /// Runs it with the user's further arguments and prints what it measured.
    run: fn(&Context, &[String]) -> anyhow::Result<()>,
}

const BENCHES: &[Bench] = &[];

/// Runs the benchmark of this name, or lists them all.
pub fn bench(context: &Context, name: Option<&str>, args: &[String]) -> anyhow::Result<()> {
    let Some(name) = name else {
        if BENCHES.is_empty() {
            println!("no benchmarks yet");
        }
        for bench in BENCHES {
            println!("{:<12} {}", bench.name, bench.about);
        }
        return Ok(());
    };
    match BENCHES.iter().find(|bench| bench.name == name) {
        Some(bench) => (bench.run)(context, args),
        None => bail!("there is no benchmark {name:?}; cargo xtask bench lists them"),
    }
}
