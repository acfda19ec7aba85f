//! The benchmarks. Each has a file, and a line in the table below.

mod cost;
mod crowd;
mod fleet;
mod heap;
mod host;
mod memory;
mod page;
mod peers;
mod processes;
mod python;
mod scratch;
mod stacks;
mod statistics;
mod top;
mod unwind;

use std::path::PathBuf;
use std::process::Command;

use anyhow::bail;

use crate::context::Context;
use crate::shell::run;

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
    Bench { name: "coverage", about: statistics::ABOUT_COVERAGE, run: statistics::coverage },
    Bench { name: "crowd", about: crowd::ABOUT, run: crowd::run },
    Bench { name: "fleet", about: fleet::ABOUT, run: fleet::run },
    Bench { name: "host", about: host::ABOUT, run: host::run },
    Bench { name: "growth", about: statistics::ABOUT_GROWTH, run: statistics::growth },
    Bench { name: "processes", about: processes::ABOUT, run: processes::run },
    Bench { name: "python", about: python::ABOUT, run: python::run },
    Bench { name: "real-coverage", about: statistics::ABOUT_REAL_COVERAGE, run: statistics::real_coverage },
    Bench { name: "page", about: page::ABOUT, run: page::run },
    Bench { name: "peers", about: peers::ABOUT, run: peers::run },
    Bench { name: "programs", about: peers::ABOUT_PROGRAMS, run: peers::programs },
    Bench { name: "study", about: peers::ABOUT_STUDY, run: peers::study },
    Bench { name: "heap", about: heap::ABOUT, run: heap::run },
    Bench { name: "memory", about: memory::ABOUT, run: memory::run },
    Bench { name: "stacks", about: stacks::ABOUT, run: stacks::run },
    Bench { name: "statistics", about: statistics::ABOUT_STATISTICS, run: statistics::statistics },
    Bench { name: "top", about: top::ABOUT, run: top::run },
    Bench { name: "unwind", about: unwind::ABOUT, run: unwind::run },
];

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

/// Builds a program of the crate `heapbpf-bench` for release and runs it, for measurements inside the daemon's code.
fn run_program(context: &Context, program: &str, args: &[String]) -> anyhow::Result<()> {
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
