//! Python stacks: what reading them adds to a sample, and the daemon's memory with many functions.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Lines, Write as _};
use std::path::PathBuf;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context as _, ensure};

use super::scratch::{Dir, Running};
use crate::context::Context;
use crate::root::Privilege;

/// One-line description of the benchmark.
pub const ABOUT: &str = "[PYTHON]: what Python frames add to a sample, and the daemon's memory with 50,000 functions";

/// Calls below which the program allocates, in addition to the frames of its own functions.
const DEPTHS: [u64; 4] = [0, 18, 38, 98];
/// The program's frames outside of these calls, including the innermost one.
const FRAMES_BESIDE: u64 = 3;
const FUNCTIONS: u64 = 50_000;
const ROUNDS: usize = 5;

/// Builds heapbpf and measures one interpreter: `/usr/bin/python3` unless another one is named.
pub fn run(context: &Context, args: &[String]) -> anyhow::Result<()> {
    ensure!(matches!(context.privilege, Privilege::Root), "this benchmark runs as root: sudo cargo xtask bench python");
    let bench = Bench {
        python: args.first().cloned().unwrap_or_else(|| "/usr/bin/python3".into()),
        program: context.root.join("tests/programs/python_cost.py"),
        heapbpf: std::env::var_os("HEAPBPF_BIN").map_or_else(|| context.binary(), PathBuf::from),
        dir: Dir::new()?,
    };
    ensure!(bench.heapbpf.exists(), "no {}: cargo xtask build makes it", bench.heapbpf.display());
    bench.cost()?;
    bench.memory()
}

struct Bench {
    python: String,
    program: PathBuf,
    heapbpf: PathBuf,
    dir: Dir,
}

/// A running `python_cost.py`.
struct Program {
    // Held so that it is killed at the end.
    running: Running,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Program {
    /// Sends a line. Returns the CPU time of an allocation, nanoseconds.
    fn ask(&mut self, line: &str) -> anyhow::Result<f64> {
        writeln!(self.input, "{line}")?;
        self.line()?.trim().parse().context("not a number")
    }

    fn line(&mut self) -> anyhow::Result<String> {
        Ok(self.output.next().context("the program ended")??)
    }
}

impl Bench {
    fn start(&self, words: &[&str]) -> anyhow::Result<Program> {
        let mut command = Command::new(&self.python);
        command.arg(&self.program).args(words).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("cannot start {}", self.python))?;
        let (input, output) = (child.stdin.take().context("piped")?, child.stdout.take().context("piped")?);
        let output = BufReader::new(output).lines();
        let mut program = Program { running: Running(child), input, output };
        ensure!(program.line()?.starts_with("READY"), "the program did not start");
        Ok(program)
    }

    /// Starts a recording that samples every allocation.
    fn record(&self, program: &Program) -> anyhow::Result<Running> {
        let mut command = Command::new(&self.heapbpf);
        command.args(["-q", "--force", "-i", "1", "--no-follow", "--max-overhead", "none"]);
        command.args(["-p", &program.running.0.id().to_string(), "-o"]).arg(self.dir.path().join("profile.json"));
        Running::start(&mut command, "heapbpf: recording", true)
    }

    /// Measures the target's CPU time for an allocation and its sample, at several depths: the medians of interleaved
    /// rounds. From Python 3.11 on, calls between Python functions use no native stack, so there the difference is due
    /// to the Python frames only.
    fn cost(&self) -> anyhow::Result<()> {
        let mut program = self.start(&["depth"])?;
        let bare = program.ask("0")?;
        let mut recording = self.record(&program)?;
        // The first samples make the daemon examine the interpreter.
        program.ask("0")?;
        let mut spent = vec![Vec::new(); DEPTHS.len()];
        for _ in 0..ROUNDS {
            for (depth, spent) in DEPTHS.iter().zip(&mut spent) {
                spent.push(program.ask(&depth.to_string())?);
            }
        }
        recording.interrupt()?;
        println!("python: {}: an allocation takes {:.2} µs bare", self.python, bare * 1e-3);
        let medians: Vec<f64> = spent.iter_mut().map(|spent| median(spent)).collect();
        let first = medians.first().copied().unwrap_or(f64::NAN);
        for (depth, ns) in DEPTHS.iter().zip(&medians) {
            println!(
                "python: sampled below {} Python frames it takes {:.2} µs: {:.2} µs more than below {FRAMES_BESIDE}",
                depth + FRAMES_BESIDE,
                ns * 1e-3,
                (ns - first) * 1e-3
            );
        }
        Ok(())
    }

    /// Measures the daemon's resident memory before and after it has observed many functions.
    fn memory(&self) -> anyhow::Result<()> {
        let mut program = self.start(&["functions", &FUNCTIONS.to_string()])?;
        let mut recording = self.record(&program)?;
        let before = resident_mib(recording.0.id())?;
        program.ask("go")?;
        // Names are read right after the samples.
        std::thread::sleep(std::time::Duration::from_secs(3));
        let after = resident_mib(recording.0.id())?;
        recording.interrupt()?;
        let profile = fs::read_to_string(self.dir.path().join("profile.json"))?;
        let names = profile.split("\"function_").skip(1);
        let names = names.filter_map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next());
        let named = names.filter(|digits| !digits.is_empty()).collect::<BTreeSet<_>>().len();
        println!(
            "python: {FUNCTIONS} functions, {named} of them named in the profile: the daemon's memory is {before:.0} MiB \
             before and {after:.0} MiB after them"
        );
        Ok(())
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn resident_mib(pid: u32) -> anyhow::Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let kib =
        status.lines().find_map(|line| line.strip_prefix("VmRSS:")).and_then(|line| line.split_whitespace().next());
    Ok(kib.context("no resident memory")?.parse::<f64>()? / 1024.0)
}
