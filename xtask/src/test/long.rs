//! The long set: tests in modules called `long`, kernels in an emulator, fuzzing with coverage, licences, other
//! machines. Runs all of it, or a shard: one part after the other, starting at a different one for each commit, for a
//! given time.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::programs::{self, Manner, Outcome, Program};
use super::stages;
use crate::nightly;
use crate::shell::say;

/// The cases that also run in an emulator, and the kernel that a shard boots.
const KERNEL_CASES: &str = "long::kernels::";
const KERNEL: &str = "6.12";

/// A part of the long set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// A test of a program, as root if it is an end-to-end test.
    Test(Program, String),
    /// A case on another kernel.
    Emulated(String),
    /// A fuzz target, with coverage, for a minute.
    Fuzzed(String),
    /// Licences of all dependencies.
    Licences,
    /// The daemon compiles for another machine.
    OtherMachine,
}

impl Part {
    /// Returns its name in messages.
    pub fn name(&self) -> String {
        match self {
            Self::Test(_, name) => name.clone(),
            Self::Emulated(case) => format!("{case} on Linux {KERNEL}"),
            Self::Fuzzed(target) => format!("fuzzing {target}"),
            Self::Licences => "licences".to_owned(),
            Self::OtherMachine => "compiling for other machines".to_owned(),
        }
    }

    /// Returns the call of xtask that runs it, if it is not a test.
    fn command(&self) -> Option<Command> {
        let words: Vec<&str> = match self {
            Self::Test(..) => return None,
            Self::Emulated(case) => vec!["vm", KERNEL, "--case", case, "--skip-unavailable"],
            Self::Fuzzed(target) => vec!["fuzz", "--fast", "--seconds", "60", target],
            Self::Licences => vec!["deny"],
            Self::OtherMachine => vec!["test", "--others"],
        };
        let mut command = Command::new(std::env::current_exe().ok()?);
        command.args(words).arg("--locked");
        Some(command)
    }
}

/// Returns all parts of the long set, or those that a shard may run.
///
/// # Errors
/// A test program does not list its tests, or the fuzz targets do not exist.
pub fn parts(root: &Path, programs: &[Program], is_shard: bool) -> anyhow::Result<Vec<Part>> {
    let mut parts = vec![Part::Licences, Part::OtherMachine];
    for program in programs {
        let tests = program.tests("long::")?.into_iter().filter(|name| programs::is_long(name));
        for name in tests {
            if let Some((_, case)) = name.split_once(KERNEL_CASES) {
                parts.push(Part::Emulated(case.to_owned()));
            }
            parts.push(Part::Test(program.clone(), name));
        }
    }
    // A shard has no time to install cargo-fuzz.
    if nightly::has(if is_shard { "fuzz" } else { "check" }) {
        let dir = root.join("fuzz/fuzz_targets");
        let files = fs::read_dir(&dir).with_context(|| format!("cannot read {}", dir.display()))?.flatten();
        let targets = files.filter_map(|file| Some(file.path().file_stem()?.to_string_lossy().into_owned()));
        parts.extend(targets.map(Part::Fuzzed));
    } else {
        say!(
            "skipped: fuzzing with coverage: rustup has no nightly toolchain with cargo-fuzz (the landing set replays the seeds)"
        );
    }
    Ok(parts)
}

/// Returns the parts in the order of a shard: rotated by a number derived from the commit.
pub fn order(mut parts: Vec<Part>, commit: &str) -> Vec<Part> {
    parts.sort_by_key(Part::name);
    if !parts.is_empty() {
        let first = hash(commit) % parts.len() as u64;
        parts.rotate_left(first as usize);
    }
    parts
}

/// FNV-1a (Fowler, Noll, Vo): the same in every release of Rust, unlike the library's hasher.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Runs parts, until the time is over if there is a limit. A part that is running then is ended and not counted.
///
/// # Errors
/// A program cannot be run.
pub fn run(
    parts: &[Part],
    within: Option<Duration>,
    command: impl Fn(&Program) -> anyhow::Result<Command>,
    verbose: bool,
) -> anyhow::Result<Outcome> {
    let begun = Instant::now();
    let mut all = Outcome::default();
    for part in parts {
        let left = within.map(|within| within.saturating_sub(begun.elapsed()));
        if left.is_some_and(|left| left.is_zero()) {
            break;
        }
        let outcome = match part {
            Part::Test(program, name) => {
                let mut arguments = vec!["--exact", name.as_str(), "--test-threads=1"];
                // A shard has no time for the soak and the study of coverage. Benchmarks are not in this set.
                arguments.extend(left.is_none().then_some("--include-ignored"));
                let manner = Manner { show: true, verbose, within: left, ..Manner::default() };
                programs::run(&mut command(program)?, &arguments, manner)?
            }
            other => run_other(other, left)?,
        };
        all.add(outcome);
    }
    for name in &all.cut_off {
        say!("not finished in the time of this shard: {name}");
    }
    Ok(all)
}

/// Runs a part that is another call of xtask.
fn run_other(part: &Part, within: Option<Duration>) -> anyhow::Result<Outcome> {
    let (begun, mut outcome) = (Instant::now(), Outcome::default());
    let own = part.command().context("xtask does not find itself")?;
    let mut command = Command::new("timeout");
    // 0 means no limit.
    command.arg(within.map_or(0, |within| within.as_secs().max(1)).to_string()).arg(own.get_program());
    // Its stages belong to the shard's stage.
    command.env_remove(stages::VARIABLE);
    let status = command.args(own.get_args()).status().context("cannot start timeout(1)")?;
    match status.code() {
        Some(0) => outcome.passed.push((part.name(), begun.elapsed().as_secs_f64())),
        Some(124) => outcome.cut_off.push(part.name()),
        _ => outcome.failed.push((part.name(), status.to_string())),
    }
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_commit_has_an_order_of_its_own_that_can_be_repeated() {
        let parts = || (0..50).map(|number| Part::Fuzzed(format!("target {number:02}"))).collect::<Vec<_>>();
        let [first, again, other] = ["5f0c2a", "5f0c2a", "5f0c2b"].map(|commit| order(parts(), commit));
        assert_eq!(first, again);
        assert_ne!(first, other);
        let mut sorted = other;
        sorted.sort_by_key(Part::name);
        assert_eq!(sorted, parts(), "each part once");
    }
}
