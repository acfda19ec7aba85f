//! Compares profilers side by side, and installs those that are missing.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;

use super::cost::{compile, heapbpf};
use crate::context::Context;
use crate::packages;
use crate::shell::{on_path, read, run as run_command, say};

/// One-line description of the benchmark.
pub const ABOUT: &str = "profilers side by side, heapbpf with --hook probe, into docs/overhead.md ([--quick | --inline] [--rounds N] [--only NAMES] [--workloads NAMES] [--print]); --inline: real programs with inline hooks, into docs/inline.md";

/// Builds everything and runs the comparison as root.
pub fn run(context: &Context, args: &[String]) -> anyhow::Result<()> {
    let heapbpf = heapbpf(context)?;
    install(context);
    let flags = ["-fno-omit-frame-pointer", "-fno-optimize-sibling-calls", "-fno-builtin-malloc", "-no-pie"];
    let churn = compile(context, "churn", &flags)?;
    let programs = churn.parent().context("in a directory")?.to_path_buf();
    if let Err(error) = compile_preloaded(context, &programs) {
        say!("WITHOUT tcmalloc's sampler: {error:#}");
    }
    let program = super::build_program(context, "heapbpf-bench-peers")?;
    let mut command = context.privilege.command("measure with BPF programs", &program, [])?;
    command.arg("--programs").arg(&programs).arg("--sources").arg(context.root.join("tests/programs"));
    command.arg("--heapbpf").arg(heapbpf);
    if let Some(headers) = headers(context)? {
        command.arg("--headers").arg(headers);
    }
    let prints = ["--quick", "--print", "--only", "--workloads"];
    if !args.iter().any(|word| prints.iter().any(|print| word.starts_with(print))) {
        let document = if args.iter().any(|word| word == "--inline") { "docs/inline.md" } else { "docs/overhead.md" };
        command.arg("--document").arg(context.root.join(document));
    }
    command.args(args.iter().filter(|word| *word != "--print"));
    run_command(&mut command, context.options.verbose)
}

/// Installs the profilers to compare with. One that cannot be installed is reported and left out of the table.
fn install(context: &Context) {
    let wanted: [(&str, &[(&str, &str)]); 8] = [
        ("memleak-bpfcc", &[("bpfcc-tools", "bcc's memleak, to compare with")]),
        ("bpftrace", &[("bpftrace", "scripts to compare with")]),
        ("heaptrack", &[("heaptrack", "a profiler inside the process, to compare with")]),
        ("sqlite3", &[("sqlite3", "a program to measure with")]),
        (
            "redis-benchmark",
            &[
                ("redis-server", "a program to measure with (Debian starts it as a service, too)"),
                ("redis-tools", "asks it for work"),
            ],
        ),
        ("gcc", &[("gcc", "a program to measure with, and to compile others")]),
        ("jeprof", &[("libjemalloc-dev", "an allocator with a profiler of its own")]),
        (
            "google-pprof",
            &[
                ("libgoogle-perftools-dev", "an allocator with two profilers of its own"),
                ("google-perftools", "its tools"),
            ],
        ),
    ];
    for (command, packages) in wanted {
        if on_path(command).is_none()
            && let Err(error) = packages::install(context, packages)
        {
            say!("WITHOUT {command}: {error:#}");
        }
    }
}

/// Compiles the library that makes tcmalloc write its samples.
fn compile_preloaded(context: &Context, dir: &std::path::Path) -> anyhow::Result<()> {
    if on_path("c++").is_none() {
        packages::install(context, &[("g++", "compiles a library for tcmalloc")])?;
    }
    let mut command = Command::new("c++");
    command.args(["-O2", "-shared", "-fPIC", "-o"]).arg(dir.join("tcmalloc_sample.so"));
    command.arg(context.root.join("tests/programs/tcmalloc_sample.cc")).arg("-ltcmalloc");
    run_command(&mut command, context.options.verbose)
}

/// Returns kernel headers for bcc. `None` if the kernel provides them, otherwise a tree of links to Debian's two header
/// packages.
fn headers(context: &Context) -> anyhow::Result<Option<PathBuf>> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let own = PathBuf::from("/lib/modules").join(release.trim()).join("build");
    if own.exists() || PathBuf::from("/sys/kernel/kheaders.tar.xz").exists() || on_path("memleak-bpfcc").is_none() {
        return Ok(None);
    }
    let package = ("linux-headers-amd64", "bcc compiles against kernel headers, and this kernel has none");
    if let Err(error) = packages::install(context, &[package]) {
        say!("WITHOUT memleak: {error:#}");
        return Ok(None);
    }
    let tree = context.target().join("bench/kernel-headers");
    if !tree.join("Makefile").exists() {
        fs::create_dir_all(&tree).with_context(|| format!("cannot create {}", tree.display()))?;
        let merge = "cp -as $(ls -d /usr/src/linux-headers-*-common | tail -1)/. . && cp -asf $(ls -d /usr/src/linux-headers-*-amd64 | tail -1)/. .";
        read(Command::new("sh").args(["-c", merge]).current_dir(&tree))?;
    }
    Ok(Some(tree))
}
