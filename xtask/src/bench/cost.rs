//! The cost that heapbpf adds to a malloc/free pair, compared with no-op probes at the same instructions.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;

use crate::build;
use crate::context::Context;
use crate::packages;
use crate::shell::{on_path, run as run_command};

/// One-line description of the benchmark.
pub const ABOUT: &str = "a malloc/free pair under heapbpf as ratios to two no-op probes at the same instructions ([--quick] [--rounds N] [--inline | --arrival]); pairs with probes and inline hooks, programs when a recording begins";

/// Debian packages with the allocators that `--inline` measures.
const ALLOCATORS: [(&str, &str); 4] = [
    ("libjemalloc2", "an allocator to measure"),
    ("libgoogle-perftools4", "an allocator to measure"),
    ("musl-tools", "a C library to measure"),
    ("python3", "objects to measure"),
];

/// Debian packages with the programs that `--arrival` measures. It also measures ruby and octave if they are installed.
const PROGRAMS: [(&str, &str); 2] = [("sqlite3", "a program to measure"), ("python3", "a program to measure")];

/// Builds heapbpf and the workload, and runs the benchmark as root.
pub fn run(context: &Context, args: &[String]) -> anyhow::Result<()> {
    let (pairs, heapbpf) = (compile(context, "pair_loop", &[])?, heapbpf(context)?);
    let has = |name: &str| args.iter().any(|word| word == name);
    let program = super::build_program(context, "heapbpf-bench-cost")?;
    let mut command = context.privilege.command("measure with BPF programs", &program, [])?;
    command.arg("--pairs").arg(pairs).arg("--heapbpf").arg(heapbpf).args(args);
    if has("--inline") {
        packages::install(context, &ALLOCATORS)?;
        command.arg("--musl-pairs").arg(compile_by(context, "musl-gcc", "pair_loop", "pair_loop_musl", &["-static"])?);
        command.arg("--python-pairs").arg(context.root.join("tests/programs/python_pairs.py"));
    }
    if has("--arrival") {
        packages::install(context, &PROGRAMS)?;
    }
    run_command(&mut command, context.options.verbose)
}

/// The heapbpf to measure: the one that `HEAPBPF_BIN` names, or else a fresh build.
pub fn heapbpf(context: &Context) -> anyhow::Result<PathBuf> {
    std::env::var_os("HEAPBPF_BIN").map_or_else(|| build::build(context), |path| Ok(path.into()))
}

/// Compiles one of the programs in `tests/programs`, with additional flags.
pub fn compile(context: &Context, name: &str, flags: &[&str]) -> anyhow::Result<PathBuf> {
    if on_path("cc").is_none() {
        packages::install(context, &[("gcc", "compiles the workload"), ("libc6-dev", "its C library")])?;
    }
    compile_by(context, "cc", name, name, flags)
}

/// Does the same with a given compiler and program name.
fn compile_by(context: &Context, compiler: &str, source: &str, name: &str, flags: &[&str]) -> anyhow::Result<PathBuf> {
    let dir = context.target().join("bench");
    fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let program = dir.join(name);
    let mut compile = Command::new(compiler);
    compile
        .args(["-O2", "-g", "-D_GNU_SOURCE", "-pthread"])
        .args(flags)
        .arg("-o")
        .arg(&program)
        .arg(context.root.join("tests/programs").join(source).with_extension("c"))
        .arg("-lm");
    run_command(&mut compile, context.options.verbose)?;
    Ok(program)
}
