//! `cargo xtask test`: what the tests need, the builds, the unit tests, then the end-to-end tests as root.
//!
//! End-to-end tests are the files in `tests/tests`; all others are unit tests here. The few of those that need root skip
//! loudly without it, and are run again with sudo.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::Context as _;
use clap::Args;

use crate::build;
use crate::context::Context;
use crate::cross::{self, Machine};
use crate::packages::{self, Package};
use crate::python;
use crate::root::Privilege;
use crate::shell::{describe, read, run, say, succeeds};

/// What cargo is to test without root, call by call.
const UNIT: &[&[&str]] = &[&["--workspace", "--exclude", "heapbpf-tests"], &["--package", "heapbpf-tests", "--lib"]];

/// What cargo is to test as root.
const END_TO_END: &[&str] = &["--package", "heapbpf-tests", "--test", "*"];

/// Names the Python of tests that need its packages.
const PYTHON_VARIABLE: &str = "HEAPBPF_TEST_PYTHON";

/// Which tests to run; by default all of them.
#[derive(Args, Debug, Default)]
pub struct Selection {
    /// Only the unit tests: no root, no BPF
    #[arg(long, conflicts_with = "e2e")]
    unit: bool,
    /// Only the end-to-end tests
    #[arg(long)]
    e2e: bool,
    /// Only the unit tests, built for another machine (such as aarch64-unknown-linux-gnu) and emulated
    #[arg(long, value_name = "TRIPLE", conflicts_with = "e2e")]
    target: Option<String>,
    /// Only tests whose name contains this
    filter: Option<String>,
}

/// What the tests use: the file that shows it is there, Debian's package, what for. The tests use the
/// distribution's own, not what a version manager put before it. A test whose tool cannot be had skips loudly by itself.
const NEEDED: &[(&str, &str, &str)] = &[
    ("/usr/bin/cc", "gcc", "compiles the test programs, and is profiled while it compiles"),
    ("/usr/bin/c++", "g++", "compiles the test programs that throw"),
    ("/usr/include/stdlib.h", "libc6-dev", "what the test programs are compiled against"),
    ("/usr/share/doc/libc6-dbg", "libc6-dbg", "names functions inside libc, which known call paths go through"),
    ("/usr/bin/python3", "python3", "is profiled while it parses JSON"),
    ("/usr/bin/sqlite3", "sqlite3", "is profiled while it fills a table"),
    ("/usr/bin/redis-server", "redis-server", "is profiled while its threads serve"),
    ("/usr/bin/memcached", "memcached", "is profiled while its threads serve"),
    ("/usr/bin/rg", "ripgrep", "is profiled while it searches: a Rust program"),
    ("/usr/bin/gdb", "gdb", "is profiled while it throws exceptions"),
    ("/usr/bin/node", "nodejs", "is profiled while it runs code that it made"),
    ("/usr/bin/prometheus", "prometheus", "scrapes the metrics"),
    ("/usr/bin/go", "golang-go", "go tool pprof reads the profiles"),
    ("/usr/bin/jeprof", "libjemalloc-dev", "jeprof reads the profiles"),
    ("/usr/bin/chromium", "chromium", "shows the page"),
    ("/usr/bin/xz", "xz-utils", "packs symbol tables"),
    ("/usr/lib/x86_64-linux-gnu/libjemalloc.so.2", "libjemalloc2", "an allocator that is profiled"),
    ("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", "libtcmalloc-minimal4", "an allocator that is profiled"),
    ("/usr/lib/x86_64-linux-gnu/libmimalloc.so.2", "libmimalloc2.0", "an allocator that is profiled"),
    ("/usr/lib/x86_64-linux-musl/musl-gcc.specs", "musl-tools", "compiles test programs for another libc"),
];

/// Runs the tests; the exit code is a failure if any of them failed.
pub fn test(context: &Context, selection: &Selection) -> anyhow::Result<ExitCode> {
    if let Some(triple) = &selection.target
        && let Some(machine) = cross::machine(triple).map_err(anyhow::Error::msg)?
    {
        return emulated(context, machine, selection);
    }
    let root_refused = context.privilege.refusal();
    let end_to_end = !selection.unit && selection.target.is_none();
    if end_to_end {
        install_needed(context);
        build::build(context)?;
        if let Some(reason) = root_refused {
            list_skipped(context, selection, reason)?;
        }
    }
    let mut calls = Vec::new();
    if !selection.e2e {
        // `--unit` installs nothing that needs root.
        let python = if end_to_end { readers_python(context) } else { None };
        calls.extend(cross::others().filter_map(|machine| other_machine_check(context, machine)));
        calls.extend(UNIT.iter().map(|part| unit_command(context, selection, part, python.as_deref())));
    }
    if end_to_end && root_refused.is_none() {
        calls.push(end_to_end_command(context, selection)?);
    }
    // All of them run, whatever becomes of the first.
    let mut failed = Vec::new();
    for mut call in calls {
        if !succeeds(&mut call, context.options.verbose)? {
            failed.push(describe(&call));
        }
    }
    for call in &failed {
        say!("failed: {call}");
    }
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn unit_command(context: &Context, selection: &Selection, part: &[&str], python: Option<&Path>) -> Command {
    let mut command = context.cargo("test");
    command.arg("--no-fail-fast").args(part).args(&selection.filter);
    command.envs(python.map(|python| (PYTHON_VARIABLE, python)));
    command
}

/// The Python that has what reads the formats, unless the user named one; `None`, loudly, if it cannot be had.
fn readers_python(context: &Context) -> Option<PathBuf> {
    if std::env::var_os(PYTHON_VARIABLE).is_some() {
        return None;
    }
    python::ensure(context).map_err(|error| say!("skipped: Python packages that read the formats: {error:#}")).ok()
}

/// Checks that the daemon compiles for a machine that others build for; `None`, loudly, where it cannot be.
fn other_machine_check(context: &Context, machine: &Machine) -> Option<Command> {
    if let Err(error) = machine.set_up_check(context) {
        say!("skipped: compiling for {}: {error:#}", machine.triple);
        return None;
    }
    let mut command = context.cargo("check");
    machine.aim(command.args(["--quiet", "--package", "sampler-user"]));
    Some(command)
}

/// Unit tests of another machine, emulated. The emulator has no BPF and no probes, and those tests need neither.
fn emulated(context: &Context, machine: &Machine, selection: &Selection) -> anyhow::Result<ExitCode> {
    machine.set_up(context)?;
    machine.set_up_emulator(context)?;
    let mut command = context.cargo("test");
    command.args(["--no-fail-fast", "--package", "sampler-ebpf", "--package", "sampler-user", "--lib"]);
    machine.aim(&mut command);
    command.args(&selection.filter);
    Ok(if succeeds(&mut command, context.options.verbose)? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The end-to-end tests, one at a time: the probes are in files that all processes share.
fn end_to_end_command(context: &Context, selection: &Selection) -> anyhow::Result<Command> {
    let mut command = context.cargo("test");
    command.arg("--no-fail-fast").args(END_TO_END);
    if context.privilege == Privilege::Sudo {
        command.args(["--package", "sampler-user", "--lib"]);
    }
    command.args(&selection.filter).args(["--", "--test-threads=1"]);
    as_root(context, &mut command)?;
    Ok(command)
}

/// Runs a benchmark among the end-to-end tests (one that is ignored as a test), and shows what it prints.
pub fn bench_among_tests(context: &Context, file: &str) -> anyhow::Result<()> {
    if let Some(reason) = context.privilege.refusal() {
        anyhow::bail!("needs root, and {reason}");
    }
    build::build(context)?;
    let mut command = context.cargo("test");
    command.args(["--quiet", "--package", "heapbpf-tests", "--test", file, "--"]);
    command.args(["--ignored", "--nocapture", "--test-threads=1"]);
    as_root(context, &mut command)?;
    run(&mut command, context.options.verbose)
}

/// Lets cargo's tests run as root, with the binary under test.
fn as_root(context: &Context, command: &mut Command) -> anyhow::Result<()> {
    command.env("HEAPBPF_BIN", context.binary());
    if context.privilege == Privilege::Sudo {
        say!("using sudo to run the end-to-end tests, which load BPF programs");
        // cargo itself stays with the user, and so do the files it writes.
        command.env(runner_variable(&host_triple()?), "sudo --preserve-env=HEAPBPF_BIN,PATH,RUST_BACKTRACE");
    }
    Ok(())
}

fn install_needed(context: &Context) {
    // Debian's folders of libraries are named after the machine.
    let missing =
        NEEDED.iter().filter(|(file, ..)| !Path::new(&file.replace("x86_64", std::env::consts::ARCH)).exists());
    let missing: Vec<Package> = missing.map(|(_, package, purpose)| Package::new(*package, purpose)).collect();
    if packages::install(context, &missing).is_ok() {
        return;
    }
    // One that does not exist must not keep the others away.
    for package in missing {
        let purpose = package.purpose;
        let name = package.name.clone();
        if let Err(error) = packages::install(context, &[package]) {
            say!("skipped: {name} ({purpose}): {error:#}");
        }
    }
}

fn list_skipped(context: &Context, selection: &Selection, reason: &str) -> anyhow::Result<()> {
    let mut list = context.cargo("test");
    list.arg("--quiet").args(END_TO_END).args(&selection.filter).args(["--", "--list"]);
    let names = read(&mut list).context("cannot list the end-to-end tests")?;
    for name in test_names(&names) {
        println!("test {name} ... skipped: needs root, and {reason}");
    }
    Ok(())
}

/// The names in what `cargo test -- --list` writes.
fn test_names(listing: &str) -> impl Iterator<Item = &str> {
    listing.lines().filter_map(|line| line.strip_suffix(": test"))
}

fn host_triple() -> anyhow::Result<String> {
    let version = read(Command::new("rustc").arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).context("rustc -vV names no host")
}

fn runner_variable(triple: &str) -> String {
    format!("CARGO_TARGET_{}_RUNNER", triple.replace(['-', '.'], "_").to_uppercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_tests_are_listed() {
        let listing = "truth::all_live: test\nbenchmark: bench\n\n2 tests, 1 benchmark\nexact: test\n";
        assert_eq!(test_names(listing).collect::<Vec<_>>(), ["truth::all_live", "exact"]);
    }

    #[test]
    fn cargo_finds_the_runner_by_the_hosts_name() {
        assert_eq!(runner_variable("x86_64-unknown-linux-gnu"), "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER");
    }
}
