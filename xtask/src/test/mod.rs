//! `cargo xtask test`: installs what the tests need, builds, and runs the unit tests, then the end-to-end tests as
//! root.
//!
//! The end-to-end tests are two programs of the package in `tests/`: `company` runs four tests at a time, `alone` one.
//! All others count as unit tests here. Tests in modules called `long` are the long set, which only `--long` and shards
//! run.

mod long;
mod needed;
mod programs;
mod stages;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;

use self::long::Part;
use self::needed::PYTHON_VARIABLE;
use self::programs::{Manner, Outcome, Program};
use self::stages::Stages;
use crate::build;
use crate::context::Context;
use crate::cross::{self, Machine};
use crate::root::Privilege;
use crate::shell::{describe, read, run, say, succeeds};
use crate::skips::Skips;

pub use self::needed::set_up;

/// The package whose integration tests are the end-to-end tests.
pub const END_TO_END_PACKAGE: &str = "heapbpf-tests";
/// The package's directory.
const END_TO_END_DIR: &str = "tests";
/// The programs of the end-to-end tests: tests that may run concurrently, and tests that run one at a time.
const END_TO_END: [(&str, &str); 2] = [("company", "--test-threads=4"), ("alone", "--test-threads=1")];
/// The file to which tests write what they skip.
const SKIPPED: &str = "skipped-tests";
/// Directories of the packages with unit tests that need root.
const UNIT_AS_ROOT: [&str; 7] = ["attach", "host", "kernel", "record", "remote", "serve", "symbols"];

/// Which tests to run; by default the landing set.
#[derive(Args, Debug, Default)]
pub struct Selection {
    /// Only the unit tests: no root, no BPF
    #[arg(long, conflicts_with = "e2e")]
    unit: bool,
    /// Only the end-to-end tests
    #[arg(long)]
    e2e: bool,
    /// The long set instead: repeats, torture, kernels in an emulator, fuzzing where there is a nightly. Takes hours
    #[arg(long)]
    long: bool,
    /// Only a part of the long set, which this commit chooses; the others follow as far as time allows
    #[arg(long, value_name = "COMMIT", requires = "long")]
    shard: Option<String>,
    /// Seconds that a shard may take
    #[arg(long, value_name = "N", default_value = "300", requires = "shard")]
    within: u64,
    /// Only check that the daemon compiles for the other machines, which is a part of the long set
    #[arg(long, conflicts_with_all = ["unit", "e2e", "long"])]
    others: bool,
    /// Only the unit tests, built for another machine (such as aarch64-unknown-linux-gnu) and emulated
    #[arg(long, value_name = "TRIPLE", conflicts_with = "e2e")]
    target: Option<String>,
    /// Only tests whose name contains this
    filter: Option<String>,
}

/// Runs the tests. The exit code is a failure if any of them failed.
pub fn test(context: &Context, selection: &Selection) -> anyhow::Result<ExitCode> {
    if let Some(triple) = &selection.target
        && let Some(machine) = cross::machine(triple).map_err(anyhow::Error::msg)?
    {
        return emulated(context, machine, selection);
    }
    let mut tests = Tests {
        context,
        selection,
        skips: Skips::begin(context, if selection.others { "skipped-machines" } else { SKIPPED })?,
        stages: Stages::default(),
        python: None,
        outcome: Outcome::default(),
    };
    tests.run()?;
    tests.report()
}

/// A run of the tests.
struct Tests<'a> {
    context: &'a Context,
    selection: &'a Selection,
    skips: Skips,
    stages: Stages,
    python: Option<PathBuf>,
    outcome: Outcome,
}

impl Tests<'_> {
    /// Runs everything but the report. A failed test is not an error here.
    fn run(&mut self) -> anyhow::Result<()> {
        let (context, selection) = (self.context, self.selection);
        if selection.others {
            return self.stage("check for other machines", Self::check_other_machines);
        }
        let end_to_end = !selection.unit;
        // `--unit` installs nothing that needs root.
        if end_to_end {
            // Packages come from the network while the compiler is busy.
            self.stage("release build and packages", |it| {
                let (missing, _) = build::build_while(context, || needed::install(context))?;
                missing.into_iter().for_each(|(what, why)| it.skips.note(what, why));
                it.python = needed::readers_python(context, &mut it.skips);
                Ok(())
            })?;
        }
        let programs = self.stage("tests' build", Self::compile)?;
        let (for_root, others): (Vec<Program>, Vec<Program>) = programs.into_iter().partition(is_end_to_end);
        let refused = context.privilege.refusal().filter(|_| end_to_end);
        if let Some(reason) = refused {
            for program in &for_root {
                for name in program.tests(self.filter())? {
                    self.skips.note(name, format!("needs root, and {reason}"));
                }
            }
        }
        let for_root = if end_to_end && refused.is_none() { for_root } else { Vec::new() };
        if selection.long {
            let name = if selection.shard.is_some() { "shard of the long set" } else { "long set" };
            return self.stage(name, |it| it.run_long(&[others, for_root].concat()));
        }
        if !selection.e2e {
            self.stage("unit tests", |it| it.run_unit_tests(&others))?;
            self.stage("examples in documents", Self::run_examples)?;
        }
        for (target, threads) in END_TO_END {
            let program = for_root.iter().find(|program| program.target == target);
            if let Some(program) = program {
                self.stage(target, |it| {
                    let outcome = it.run_landing(program, &[threads], true)?;
                    it.outcome.add(outcome);
                    Ok(())
                })?;
            }
        }
        Ok(())
    }

    /// Runs a stage and records its time for the table.
    fn stage<T>(&mut self, name: &str, stage: impl FnOnce(&mut Self) -> anyhow::Result<T>) -> anyhow::Result<T> {
        let clock = self.stages.begin();
        let tests = self.outcome.passed.len();
        let result = stage(self);
        self.stages.end(clock, name, self.outcome.passed.len() - tests);
        result
    }

    fn filter(&self) -> &str {
        self.selection.filter.as_deref().unwrap_or_default()
    }

    /// Builds all test programs in one call of cargo.
    fn compile(&mut self) -> anyhow::Result<Vec<Program>> {
        let mut command = self.context.cargo_for_tests("test");
        command.args(["--no-run", "--message-format=json-render-diagnostics"]);
        match (self.selection.unit, self.selection.e2e) {
            (true, _) => command.args(["--workspace", "--exclude", END_TO_END_PACKAGE]),
            (_, true) => command.args(["--package", END_TO_END_PACKAGE, "--test", "*"]),
            _ => command.arg("--workspace"),
        };
        command.stderr(std::process::Stdio::inherit());
        let output = command.output().with_context(|| format!("cannot start {}", describe(&command)))?;
        anyhow::ensure!(output.status.success(), "the tests do not compile: {}", describe(&command));
        Ok(programs::programs(&String::from_utf8_lossy(&output.stdout)))
    }

    /// Runs two programs at a time, because the last tests of one leave processors idle.
    fn run_unit_tests(&mut self, programs: &[Program]) -> anyhow::Result<()> {
        let next = AtomicUsize::new(0);
        let run = || -> anyhow::Result<Vec<Outcome>> {
            let programs = std::iter::from_fn(|| programs.get(next.fetch_add(1, Ordering::Relaxed)));
            programs.map(|program| self.run_landing(program, &[], false)).collect()
        };
        let (own, other) = std::thread::scope(|scope| {
            let other = scope.spawn(run);
            (run(), other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        own?.into_iter().chain(other?).for_each(|outcome| self.outcome.add(outcome));
        Ok(())
    }

    /// Runs the tests of a program that belong to the landing set.
    fn run_landing(&self, program: &Program, arguments: &[&str], show: bool) -> anyhow::Result<Outcome> {
        let mut command = self.command(program)?;
        // An empty filter matches every name.
        let arguments = [arguments, &["--skip", "long::", self.filter()]].concat();
        let manner = Manner { show, verbose: self.context.options.verbose, ..Manner::default() };
        let outcome = programs::run(&mut command, &arguments, manner)?;
        if show || !outcome.failed.is_empty() {
            say!("{}: {} passed, {} failed", program.target, outcome.passed.len(), outcome.failed.len());
        }
        Ok(outcome)
    }

    /// Runs the long set, or a shard of it.
    fn run_long(&mut self, programs: &[Program]) -> anyhow::Result<()> {
        let mut parts = long::parts(&self.context.root, programs, self.selection.shard.is_some())?;
        parts.retain(|part| part.name().contains(self.filter()));
        let within = self.selection.shard.as_ref().map(|_| Duration::from_secs(self.selection.within));
        if let Some(commit) = &self.selection.shard {
            parts = long::order(parts, commit);
            say!("the shard of {commit} begins with {}", parts.first().map(Part::name).unwrap_or_default());
        }
        let outcome = long::run(&parts, within, |program| self.command(program), self.context.options.verbose)?;
        self.outcome.add(outcome);
        Ok(())
    }

    /// Returns a call of a test program, as root if it needs that.
    fn command(&self, program: &Program) -> anyhow::Result<Command> {
        let mut command = program.command();
        command.envs(self.python.iter().map(|python| (PYTHON_VARIABLE, python)));
        self.skips.listen(&mut command);
        let as_root =
            is_end_to_end(program) || (!self.selection.unit && UNIT_AS_ROOT.contains(&program.package.as_str()));
        if as_root { under_sudo(self.context, command) } else { Ok(command) }
    }

    /// Runs the examples in documentation, which only rustdoc can run.
    fn run_examples(&mut self) -> anyhow::Result<()> {
        let mut command = self.context.cargo_for_tests("test");
        command.args(["--doc", "--quiet", "--no-fail-fast", "--workspace"]).args(&self.selection.filter);
        if !succeeds(&mut command, self.context.options.verbose)? {
            self.outcome.failed.push(("examples in documents".into(), describe(&command)));
        }
        Ok(())
    }

    /// Checks that the daemon compiles for the other machines.
    fn check_other_machines(&mut self) -> anyhow::Result<()> {
        for machine in cross::others() {
            let what = format!("compiling for {}", machine.triple);
            let Some(mut check) = other_machine_check(self.context, machine, &mut self.skips) else { continue };
            let begun = Instant::now();
            if succeeds(&mut check, self.context.options.verbose)? {
                self.outcome.passed.push((what, begun.elapsed().as_secs_f64()));
            } else {
                self.outcome.failed.push((what, describe(&check)));
            }
        }
        Ok(())
    }

    /// Reports what was skipped, what failed, and how long everything took.
    fn report(self) -> anyhow::Result<ExitCode> {
        let acceptable = self.skips.report(self.context)?;
        print!("{}", self.stages.table(&self.outcome.passed));
        self.stages.append(&self.outcome)?;
        for (name, reason) in &self.outcome.failed {
            say!("failed: {name}: {reason}");
        }
        let Outcome { passed, failed, ignored, cut_off } = &self.outcome;
        let [passed, failed, cut_off] = [passed.len(), failed.len(), cut_off.len()];
        if self.selection.shard.is_some() {
            println!("of the long set, {passed} parts passed, {failed} failed, and {cut_off} did not end in time");
        } else {
            println!("tests: {passed} passed, {failed} failed, {ignored} skipped");
        }
        Ok(if self.outcome.failed.is_empty() && acceptable { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

fn is_end_to_end(program: &Program) -> bool {
    program.package == END_TO_END_DIR && END_TO_END.iter().any(|(target, _)| *target == program.target)
}

/// Returns the call that checks that the daemon compiles for another machine. `None` if that cannot be checked here.
fn other_machine_check(context: &Context, machine: &Machine, skips: &mut Skips) -> Option<Command> {
    if let Err(error) = cross::set_up_library(context, machine) {
        skips.note(format!("compiling for {}", machine.triple), format!("{error:#}"));
        return None;
    }
    let mut command = context.cargo_for_tests("check");
    machine.aim(command.args(["--quiet", "--package", "sampler-user"]));
    // Nothing is linked, so the C and assembler parts of the TLS library are not needed.
    let tool = |name: &str| format!("{name}_{}", machine.triple.replace('-', "_"));
    command.envs([(tool("CC"), "true"), (tool("AR"), "true")]);
    Some(command)
}

/// Runs the unit tests of another machine in an emulator. The emulator has no BPF and no probes, and unit tests need
/// neither.
fn emulated(context: &Context, machine: &Machine, selection: &Selection) -> anyhow::Result<ExitCode> {
    let skips = Skips::begin(context, SKIPPED)?;
    cross::set_up(context, machine)?;
    cross::set_up_emulator(context, machine)?;
    let mut command = context.cargo_for_tests("test");
    command.args(["--no-fail-fast", "--lib", "--test", "unwinding"]);
    command.args(["--workspace", "--exclude", "heapbpf-tests", "--exclude", "heapbpf-bench", "--exclude", "xtask"]);
    machine.aim(&mut command);
    command.args(&selection.filter);
    let succeeded = succeeds(skips.listen(&mut command), context.options.verbose)?;
    let acceptable = skips.report(context)?;
    Ok(if succeeded && acceptable { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs a benchmark that is an ignored end-to-end test, with additional variables, and shows its output.
pub fn bench_among_tests(
    context: &Context,
    [program, filter]: [&str; 2],
    variables: &[(&str, &OsStr)],
) -> anyhow::Result<()> {
    prepare(context)?;
    let tests = AmongTests { program, filter, arguments: &["--ignored"], variables };
    anyhow::ensure!(tests.run(context)?, "the end-to-end tests {filter} failed");
    Ok(())
}

/// Builds what the end-to-end tests run. Fails if nothing can be run as root.
pub fn prepare(context: &Context) -> anyhow::Result<()> {
    if let Some(reason) = context.privilege.refusal() {
        anyhow::bail!("needs root, and {reason}");
    }
    build::build(context).map(|_| ())
}

/// A selection of end-to-end tests, run one at a time, with their output shown.
pub struct AmongTests<'a> {
    /// The program that contains them.
    pub program: &'a str,
    /// Text that their names contain.
    pub filter: &'a str,
    /// Additional arguments of the test program.
    pub arguments: &'a [&'a str],
    /// Environment variables for them.
    pub variables: &'a [(&'a str, &'a OsStr)],
}

impl AmongTests<'_> {
    /// Runs them, after [`prepare`], and returns whether they succeeded.
    pub fn run(&self, context: &Context) -> anyhow::Result<bool> {
        let program = test_program(context, self.program)?;
        let mut command = program.command();
        command.envs(self.variables.iter().copied());
        command.arg(self.filter).args(self.arguments).args(["--nocapture", "--test-threads=1"]);
        succeeds(&mut under_sudo(context, command)?, context.options.verbose)
    }
}

/// Builds a test program: one of the two end-to-end programs, `remote`, whose tests manipulate targets from inside, or
/// the unit tests of `host` or `kernel`.
pub fn test_program(context: &Context, target: &str) -> anyhow::Result<Program> {
    let (package, tests) = match target {
        "host" => ("heapbpf-host", vec!["--lib"]),
        "kernel" => ("heapbpf-kernel", vec!["--lib"]),
        "remote" => ("heapbpf-remote", vec!["--test", target]),
        _ => (END_TO_END_PACKAGE, vec!["--test", target]),
    };
    let mut command = context.cargo_for_tests("test");
    command.args(["--package", package]).args(tests).args(["--no-run", "--message-format=json"]);
    programs::programs(&read(&mut command)?).into_iter().next().context("cargo built no test program")
}

/// The command with the binary under test, as root.
fn under_sudo(context: &Context, mut command: Command) -> anyhow::Result<Command> {
    command.env("HEAPBPF_BIN", context.binary());
    if context.privilege != Privilege::Sudo {
        return Ok(command);
    }
    say!("using sudo to run tests that load BPF programs or write into processes");
    // A test program has its own process group, which the terminal would stop if sudo asked for a password there.
    run(Command::new("sudo").arg("-v"), context.options.verbose)?;
    let own = command.get_envs().filter_map(|(name, _)| name.to_str()).map(str::to_owned);
    let kept: Vec<String> = own
        .chain(["PATH", "RUST_BACKTRACE", "RUSTC_BOOTSTRAP", "HEAPBPF_LARGE_PAGE", "HEAPBPF_PICTURES"].map(Into::into))
        .collect();
    let mut sudo = Command::new("sudo");
    sudo.arg(format!("--preserve-env={}", kept.join(","))).arg(command.get_program()).args(command.get_args());
    sudo.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    sudo.current_dir(command.get_current_dir().unwrap_or(Path::new(".")));
    Ok(sudo)
}
