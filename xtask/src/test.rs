//! `cargo xtask test`: installs what the tests need, builds, and runs the unit tests, then the end-to-end tests as
//! root.
//!
//! The end-to-end tests are the files in `tests/tests`; all others count as unit tests here. The few unit tests that
//! need root say that they are skipped without it, and are run again with sudo.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::Context as _;
use clap::Args;

use crate::build;
use crate::context::Context;
use crate::cross::{self, Machine};
use crate::cross_tools;
use crate::packages::{self, Package};
use crate::python;
use crate::root::Privilege;
use crate::shell::{describe, read, say, succeeds};
use crate::skips::Skips;
use crate::toolchain;

/// The package whose integration tests are the end-to-end tests.
pub const END_TO_END_PACKAGE: &str = "heapbpf-tests";

/// The arguments of each cargo call that tests without root.
const UNIT: &[&[&str]] =
    &[&["--workspace", "--exclude", END_TO_END_PACKAGE], &["--package", END_TO_END_PACKAGE, "--lib"]];

/// The arguments of the cargo call that tests as root.
const END_TO_END: &[&str] = &["--package", END_TO_END_PACKAGE, "--test", "*"];

/// The variable that names the Python for tests that need its packages.
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

/// Requirements of the tests: a file that shows that the requirement is installed, Debian's package, and its purpose.
/// The tests use the distribution's version, even if a version manager has put another one first. A test whose
/// requirement cannot be installed says that it is skipped.
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
    ("/usr/bin/strace", "strace", "traces a program while it is profiled"),
    ("/usr/bin/systemd-analyze", "systemd", "runs the unit"),
    ("/usr/bin/bpftrace", "bpftrace", "has probes in a program while it is profiled"),
    ("/usr/bin/perf", "linux-perf", "samples a program while it is profiled"),
    ("/usr/bin/clang++", "clang", "is profiled while it compiles: deep stacks"),
    ("/usr/bin/Rscript", "r-base-core", "is profiled while it fits models: deep stacks"),
    ("/usr/bin/convert", "imagemagick", "is profiled while it scales a picture: stacks with unused arrays"),
    ("/usr/bin/javac", "openjdk-17-jdk-headless", "compiles a Java program, whose stacks are known"),
    ("/usr/bin/node", "nodejs", "is profiled while it runs code that it made"),
    ("/usr/bin/prometheus", "prometheus", "scrapes the metrics"),
    ("/usr/bin/go", "golang-go", "go tool pprof reads the profiles"),
    ("/usr/bin/jeprof", "libjemalloc-dev", "jeprof reads the profiles"),
    ("/usr/bin/chromium", "chromium", "shows the page"),
    ("/usr/libexec/valgrind/dh_view.html", "valgrind", "brings the viewer of DHAT's files"),
    ("/usr/bin/tmux", "tmux", "is the terminal of heapbpf top"),
    ("/usr/bin/xz", "xz-utils", "packs symbol tables"),
    ("/usr/bin/debuginfod", "debuginfod", "serves debug files"),
    ("/usr/bin/dwz", "dwz", "moves debug information that files share into one of its own"),
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
    let mut skips = Skips::begin(context)?;
    let root_refused = context.privilege.refusal();
    let end_to_end = !selection.unit && selection.target.is_none();
    if end_to_end {
        install_needed(context).into_iter().for_each(|(what, why)| skips.note(what, why));
        build::build(context)?;
        if let Some(reason) = root_refused {
            note_all(context, selection, reason, &mut skips)?;
        }
    }
    let mut calls = Vec::new();
    // `--unit` installs nothing that needs root.
    let python = if end_to_end { readers_python(context, &mut skips) } else { None };
    if !selection.e2e {
        calls.extend(cross::others().filter_map(|machine| other_machine_check(context, machine, &mut skips)));
        calls.extend(UNIT.iter().map(|part| unit_command(context, selection, part, python.as_deref())));
    }
    // All calls run, even if the first fails.
    let mut failed = Vec::new();
    let mut make = |mut call: Command| -> anyhow::Result<()> {
        if !succeeds(skips.listen(&mut call), context.options.verbose)? {
            failed.push(describe(&call));
        }
        Ok(())
    };
    calls.into_iter().try_for_each(&mut make)?;
    if end_to_end && root_refused.is_none() {
        if context.privilege == Privilege::Sudo {
            skips.forget_those_for_root()?;
        }
        make(end_to_end_command(context, selection, python.as_deref())?)?;
    }
    let acceptable = skips.report(context)?;
    for call in &failed {
        say!("failed: {call}");
    }
    Ok(if failed.is_empty() && acceptable { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn unit_command(context: &Context, selection: &Selection, part: &[&str], python: Option<&Path>) -> Command {
    let mut command = context.cargo("test");
    command.arg("--no-fail-fast").args(part).args(&selection.filter);
    command.envs(python.map(|python| (PYTHON_VARIABLE, python)));
    command
}

/// The Python with the packages that tests need, unless the user named one. `None` if it cannot be installed.
fn readers_python(context: &Context, skips: &mut Skips) -> Option<PathBuf> {
    if std::env::var_os(PYTHON_VARIABLE).is_some() {
        return None;
    }
    let python = python::ensure(context);
    python.map_err(|error| skips.note("Python packages that read the formats", format!("{error:#}"))).ok()
}

/// The call that checks that the daemon compiles for another machine. `None` if that cannot be checked here.
fn other_machine_check(context: &Context, machine: &Machine, skips: &mut Skips) -> Option<Command> {
    if let Err(error) = cross_tools::set_up_library(context, machine) {
        skips.note(format!("compiling for {}", machine.triple), format!("{error:#}"));
        return None;
    }
    let mut command = context.cargo("check");
    machine.aim(command.args(["--quiet", "--package", "sampler-user"]));
    // Nothing is linked, so that nobody misses what a library for TLS has in C and assembler.
    let tool = |name: &str| format!("{name}_{}", machine.triple.replace('-', "_"));
    command.envs([(tool("CC"), "true"), (tool("AR"), "true")]);
    Some(command)
}

/// Runs the unit tests of another machine in an emulator. The emulator has no BPF and no probes; unit tests need
/// neither.
fn emulated(context: &Context, machine: &Machine, selection: &Selection) -> anyhow::Result<ExitCode> {
    let skips = Skips::begin(context)?;
    cross_tools::set_up(context, machine)?;
    cross_tools::set_up_emulator(context, machine)?;
    let mut command = context.cargo("test");
    command.args(["--no-fail-fast", "--lib", "--test", "unwinding"]);
    command.args(["--workspace", "--exclude", "heapbpf-tests", "--exclude", "heapbpf-bench", "--exclude", "xtask"]);
    machine.aim(&mut command);
    command.args(&selection.filter);
    let succeeded = succeeds(skips.listen(&mut command), context.options.verbose)?;
    let acceptable = skips.report(context)?;
    Ok(if succeeded && acceptable { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The end-to-end tests, one at a time, because the probes are in files that all processes share.
fn end_to_end_command(context: &Context, selection: &Selection, python: Option<&Path>) -> anyhow::Result<Command> {
    let mut command = context.cargo("test");
    command.envs(python.map(|python| (PYTHON_VARIABLE, python)));
    command.arg("--no-fail-fast").args(END_TO_END);
    if context.privilege == Privilege::Sudo {
        command.args(["--package", "sampler-user", "--package", "heapbpf-remote", "--lib"]);
    }
    command.args(&selection.filter).args(["--", "--test-threads=1"]);
    as_root(context, &mut command)?;
    Ok(command)
}

/// Runs a benchmark that is an ignored end-to-end test, with further variables, and shows its output.
pub fn bench_among_tests(context: &Context, file: &str, variables: &[(&str, &OsStr)]) -> anyhow::Result<()> {
    prepare(context)?;
    let tests = AmongTests { file, arguments: &["--ignored"], variables };
    anyhow::ensure!(tests.run(context)?, "the end-to-end test {file} failed");
    Ok(())
}

/// Builds what end-to-end tests run; fails if nothing can be run as root.
pub fn prepare(context: &Context) -> anyhow::Result<()> {
    if let Some(reason) = context.privilege.refusal() {
        anyhow::bail!("needs root, and {reason}");
    }
    build::build(context).map(|_| ())
}

/// Some of the end-to-end tests, whose output is shown.
pub struct AmongTests<'a> {
    /// File of the tests, without its ending.
    pub file: &'a str,
    /// Further arguments of the test program.
    pub arguments: &'a [&'a str],
    /// Variables that they heed.
    pub variables: &'a [(&'a str, &'a OsStr)],
}

impl AmongTests<'_> {
    /// Runs them, after [`prepare`], and returns whether they succeeded.
    pub fn run(&self, context: &Context) -> anyhow::Result<bool> {
        let mut command = context.cargo("test");
        command.envs(self.variables.iter().copied());
        command.args(["--quiet", "--package", END_TO_END_PACKAGE, "--test", self.file, "--"]);
        command.args(self.arguments).args(["--nocapture", "--test-threads=1"]);
        as_root(context, &mut command)?;
        succeeds(&mut command, context.options.verbose)
    }
}

/// Makes cargo run its tests as root, with the binary under test.
fn as_root(context: &Context, command: &mut Command) -> anyhow::Result<()> {
    command.env("HEAPBPF_BIN", context.binary());
    if context.privilege == Privilege::Sudo {
        say!("using sudo to run the end-to-end tests, which load BPF programs");
        // cargo itself runs as the user, who then owns the files it writes.
        let own = command.get_envs().filter_map(|(name, _)| name.to_str()).filter(|name| name.starts_with("HEAPBPF_"));
        let own: Vec<&str> = own.chain(["HEAPBPF_SKIPPED", "HEAPBPF_LARGE_PAGE", "HEAPBPF_PICTURES"]).collect();
        let runner = format!("sudo --preserve-env={},PATH,RUST_BACKTRACE", own.join(","));
        command.env(runner_variable(&toolchain::host()?.triple), runner);
    }
    Ok(())
}

/// Installs what the end-to-end tests need; what is missing, and why.
fn install_needed(context: &Context) -> Vec<(String, String)> {
    // Debian names its library folders after the architecture.
    let missing =
        NEEDED.iter().filter(|(file, ..)| !Path::new(&file.replace("x86_64", std::env::consts::ARCH)).exists());
    let missing: Vec<Package> = missing.map(|(_, package, purpose)| Package::new(*package, purpose)).collect();
    if packages::install(context, &missing).is_ok() {
        return Vec::new();
    }
    // Installed one by one, so that a package that does not exist does not block the others.
    let install = |package: Package| {
        let what = format!("installing {}, which {}", package.name, package.purpose);
        packages::install(context, &[package]).err().map(|error| (what, format!("{error:#}")))
    };
    missing.into_iter().filter_map(install).collect()
}

/// Installs what the tests need, without a word of what cannot be installed: the tests will tell.
pub fn set_up(context: &Context) {
    install_needed(context);
    cross::others().for_each(|machine| drop(cross_tools::set_up(context, machine)));
    drop(python::ensure(context));
}

/// Notes every end-to-end test as skipped.
fn note_all(context: &Context, selection: &Selection, reason: &str, skips: &mut Skips) -> anyhow::Result<()> {
    let mut list = context.cargo("test");
    list.arg("--quiet").args(END_TO_END).args(&selection.filter).args(["--", "--list"]);
    let names = read(&mut list).context("cannot list the end-to-end tests")?;
    for name in test_names(&names) {
        skips.note(name, format!("needs root, and {reason}"));
    }
    Ok(())
}

/// The test names in the output of `cargo test -- --list`.
fn test_names(listing: &str) -> impl Iterator<Item = &str> {
    listing.lines().filter_map(|line| line.strip_suffix(": test"))
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
