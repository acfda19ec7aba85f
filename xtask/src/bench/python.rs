//! `cargo xtask bench python`: benchmarks of pyperformance under heapbpf, memray and scalene.

use super::cost::heapbpf;
use crate::context::Context;
use crate::python;
use crate::shell::run as run_command;

/// One-line description of the benchmark.
pub const ABOUT: &str =
    "Python programs of pyperformance beside memray and scalene: cost, and shares of functions ([ROUNDS])";

const PACKAGES: [&str; 4] = ["pyperformance==1.14.0", "pyperf==2.11.0", "memray==1.20.0", "scalene==2.4.0"];

/// Builds heapbpf, installs the others, and runs all as root.
pub fn run(context: &Context, args: &[String]) -> anyhow::Result<()> {
    let (heapbpf, python) = (heapbpf(context)?, python::environment(context, "bench-python", &PACKAGES)?);
    let mut command = context.privilege.command("record Python programs", &python, [])?;
    command.arg(context.root.join("xtask/src/bench/python.py")).arg(heapbpf).args(args);
    run_command(&mut command, context.options.verbose)
}
