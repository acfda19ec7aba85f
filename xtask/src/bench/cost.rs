//! What heapbpf adds to a malloc/free pair, against probes that do nothing at the same instructions.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;

use crate::build;
use crate::context::{Context, on_path};
use crate::packages::{self, Package};
use crate::shell::run as run_command;

/// What it measures.
pub const ABOUT: &str = "a malloc/free pair under heapbpf as ratios to two no-op probes at the same instructions ([--quick] [--rounds N] [--criteria | --scaling])";

/// Builds heapbpf and the workload and runs it, as root.
pub fn run(context: &Context, args: &[String]) -> anyhow::Result<()> {
    let heapbpf = match std::env::var_os("HEAPBPF_BIN") {
        Some(path) => PathBuf::from(path),
        None => build::build(context)?,
    };
    let pairs = workload(context, "pair_loop")?;
    let program = super::build_program(context, "heapbpf-bench-cost")?;
    let mut command = context.privilege.command("measure with BPF programs", &program, [])?;
    command.arg("--pairs").arg(pairs).arg("--heapbpf").arg(heapbpf).args(args);
    if args.iter().any(|word| word == "--scaling") && !args.iter().any(|word| word == "--quick") {
        command.arg("--document").arg(context.root.join("docs/overhead.md"));
        command.arg("--charts").arg(context.root.join("docs/charts"));
    }
    run_command(&mut command, context.options.verbose)
}

/// Compiles one of the programs in `tests/programs`.
pub fn workload(context: &Context, name: &str) -> anyhow::Result<PathBuf> {
    compile(context, name, &[])
}

/// The same with further flags.
pub fn compile(context: &Context, name: &str, flags: &[&str]) -> anyhow::Result<PathBuf> {
    if on_path("cc").is_none() {
        packages::install(
            context,
            &[Package::new("gcc", "compiles the workload"), Package::new("libc6-dev", "its C library")],
        )?;
    }
    let folder = context.target().join("bench");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let program = folder.join(name);
    let mut compile = Command::new("cc");
    compile
        .args(["-O2", "-g", "-D_GNU_SOURCE", "-pthread"])
        .args(flags)
        .arg("-o")
        .arg(&program)
        .arg(context.root.join("tests/programs").join(name).with_extension("c"))
        .arg("-lm");
    run_command(&mut compile, context.options.verbose)?;
    Ok(program)
}
