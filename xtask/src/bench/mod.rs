//! The benchmarks: the table of all, and those that only run a program or a test. Each other one has a file.

mod cost;
mod harness;
mod host;
mod page;
mod peers;
mod processes;
mod python;
mod stacks;

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;

use anyhow::bail;

use crate::context::Context;
use crate::shell::run;
use crate::test::bench_among_tests;

/// A benchmark.
struct Bench {
    /// The name on the command line.
    name: &'static str,
    /// One-line description of what it measures.
    about: &'static str,
    /// Runs it with the user's additional arguments and prints the results.
    run: fn(&Context, &[String]) -> anyhow::Result<()>,
}

const BENCHES: &[Bench] = &[
    Bench { name: "cost", about: cost::ABOUT, run: cost::run },
    Bench {
        name: "coverage",
        about: "coverage of the intervals: 18 mixes of sizes, 20,000 profiles a cell ([PROFILES [SEEDS]])",
        run: coverage,
    },
    Bench {
        name: "errors",
        about: "errors of 3,360 short real recordings beside .NET's table and heapprofd's charts",
        run: |context, _| bench_among_tests(context, ["alone", "errors::"], &[]),
    },
    Bench { name: "host", about: host::ABOUT, run: host::run },
    Bench {
        name: "real-coverage",
        about: "coverage of the intervals of 480 short runs with known truth, through real probes",
        run: |context, _| bench_among_tests(context, ["alone", "long::coverage::error_bars_"], &[]),
    },
    Bench { name: "page", about: page::ABOUT, run: page::run },
    Bench { name: "peers", about: peers::ABOUT, run: peers::run },
    Bench { name: "processes", about: processes::ABOUT, run: processes::run },
    Bench { name: "python", about: python::ABOUT, run: python::run },
    Bench { name: "stacks", about: stacks::ABOUT, run: stacks::run },
    Bench {
        name: "statistics",
        about: "CPU time for weights, intervals and p-values of 100,000 stacks",
        run: |context, args| run_program(context, "heapbpf-bench-statistics", args),
    },
    Bench {
        name: "top",
        about: "heapbpf top over 5,000 stacks: CPU time as a share of a core, beside a recording without a screen",
        run: |context, _| bench_among_tests(context, ["company", "top::"], &[]),
    },
];

/// Simulates profiles with known truth, in a test of the crate `heapbpf-bench`.
fn coverage(context: &Context, args: &[String]) -> anyhow::Result<()> {
    let mut test = context.cargo("test");
    test.args(["--quiet", "--release", "--package", "heapbpf-bench", "--test", "coverage", "--target-dir"]);
    test.arg(context.host_target()).args(["--", "--ignored", "--nocapture"]).env("HEAPBPF_COVERAGE", args.join(" "));
    run(&mut test, context.options.verbose)
}

/// Runs the benchmark with this name, or lists all of them. With `quick` and no name, runs the comparison with other
/// profilers in under three minutes.
pub fn bench(context: &Context, name: Option<&str>, quick: bool, args: &[String]) -> anyhow::Result<()> {
    let mut args = args.to_vec();
    if quick {
        args.insert(0, "--quick".into());
    }
    let Some(name) = name.or(quick.then_some("peers")) else {
        for bench in BENCHES {
            println!("{:<14} {}", bench.name, bench.about);
        }
        return Ok(());
    };
    match BENCHES.iter().find(|bench| bench.name == name) {
        Some(bench) => (bench.run)(context, &args),
        None => bail!("there is no benchmark {name:?}; cargo xtask bench lists them"),
    }
}

/// Builds a program of the crate `heapbpf-bench` for release and runs it.
pub fn run_program<A: AsRef<OsStr>>(context: &Context, program: &str, args: &[A]) -> anyhow::Result<()> {
    let program = build_program(context, program)?;
    run(Command::new(program).args(args), context.options.verbose)
}

/// Builds a program of the crate `heapbpf-bench` for release.
fn build_program(context: &Context, program: &str) -> anyhow::Result<PathBuf> {
    let mut build = context.cargo("build");
    build.args(["--quiet", "--release", "--package", "heapbpf-bench", "--bin", program, "--target-dir"]);
    run(build.arg(context.host_target()), context.options.verbose)?;
    Ok(context.host_target().join("release").join(program))
}
