//! Many processes that are hooked inline at once, and one process with many threads: how long hooking and unhooking
//! take, and how long the targets are stopped.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use super::cost::workload;
use super::scratch::{Dir, Running};
use crate::context::Context;
use crate::root::Privilege;
use crate::shell::read;

/// One-line description of the benchmark.
pub const ABOUT: &str =
    "processes [COUNT ROUNDS] | threads [COUNT ROUNDS]: hooking inline 500 processes, and one with 200 threads";
/// Within this time, that many processes should be hooked, and let go.
const WANTED: Duration = Duration::from_secs(5);

/// Runs one of the two parts, or both; needs root.
pub fn run(context: &Context, args: &[String]) -> anyhow::Result<()> {
    ensure!(matches!(context.privilege, Privilege::Root), "this benchmark runs as root: sudo cargo xtask bench crowd");
    let number = |i: usize, otherwise: usize| args.get(i).map_or(Ok(otherwise), |text| text.parse::<usize>());
    let heapbpf = std::env::var_os("HEAPBPF_BIN").map_or_else(|| context.binary(), PathBuf::from);
    ensure!(heapbpf.exists(), "no {}: cargo xtask build makes it", heapbpf.display());
    let bench = Bench { dir: Dir::new()?, heapbpf };
    match args.first().map(String::as_str) {
        Some("processes") => bench.processes(context, number(1, 500)?, number(2, 5)?),
        Some("threads") => bench.threads(context, number(1, 200)?, number(2, 100)?),
        None => {
            bench.processes(context, 500, 5)?;
            bench.threads(context, 200, 100)
        }
        Some(other) => bail!("{other:?} is none of processes, threads"),
    }
}

struct Bench {
    dir: Dir,
    heapbpf: PathBuf,
}

/// How a recording started.
#[derive(Default)]
struct Begun {
    /// From its start to its first line about the targets.
    first: Option<Duration>,
    /// From its start until everything was in place.
    all: Duration,
    /// How long each process was stopped.
    stops: Vec<Duration>,
    /// Number of attempts that were abandoned and repeated.
    attempts: usize,
}

impl Bench {
    /// Starts a recording of these processes, and waits until it has hooked them.
    fn hook(&self, pids: &[u32]) -> anyhow::Result<(Running, Begun)> {
        let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
        let start = Instant::now();
        let mut command = Command::new(&self.heapbpf);
        command.args(["--hook", "inline", "--no-follow", "-v", "-i", "512KiB", "--force", "--pid", &pids.join(",")]);
        command.arg("-o").arg(self.dir.path().join("profile.json")).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = Running(command.spawn()?);
        let mut lines = BufReader::new(child.0.stderr.take().context("piped")?).lines();
        let mut begun = Begun::default();
        for line in &mut lines {
            let line = line?;
            if line.contains("counted from inside") {
                begun.first.get_or_insert(start.elapsed());
            }
            begun.stops.extend(line.split_once("counted from inside, stopped for ").and_then(|(_, time)| duration(time)));
            begun.attempts += usize::from(line.contains("not counted from inside yet"));
            if line.contains("not counted from inside:") {
                eprintln!("{line}");
            }
            if line.starts_with("heapbpf: recording") {
                begun.all = start.elapsed();
                // Later output is discarded, so that a full pipe does not block it.
                std::thread::spawn(move || lines.for_each(drop));
                return Ok((child, begun));
            }
        }
        bail!("heapbpf did not begin to record")
    }

    fn processes(&self, context: &Context, count: usize, rounds: usize) -> anyhow::Result<()> {
        // Each process has two pipes.
        read(Command::new("prlimit").args(["--nofile=65536:65536", "--pid", &std::process::id().to_string()]))?;
        let program = workload(context, "storm")?;
        let targets: Vec<Running> = (0..count)
            .map(|_| Running::start(Command::new(&program).arg("rest"), "READY", false))
            .collect::<anyhow::Result<_>>()?;
        let pids: Vec<u32> = targets.iter().map(|target| target.0.id()).collect();
        let (mut beginning, mut hooking, mut letting_go, mut ending, mut starting) =
            (vec![], vec![], vec![], vec![], vec![]);
        let (mut stops, mut attempts) = (vec![], 0);
        for _ in 0..rounds {
            let (mut recording, begun) = self.hook(&pids)?;
            let hooked = pids.iter().filter(|pid| is_hooked(**pid)).count();
            ensure!(hooked == count, "{hooked} of {count} are hooked");
            let first = begun.first.context("no line about the first one")?;
            starting.push(first);
            beginning.push(begun.all);
            hooking.push(begun.all.saturating_sub(first));
            attempts += begun.attempts;
            stops.extend(begun.stops);
            let asked = Instant::now();
            read(Command::new("kill").args(["-INT", &recording.0.id().to_string()]))?;
            while pids.iter().any(|pid| is_hooked(*pid)) {
                ensure!(recording.0.try_wait()?.is_none(), "it has ended, and some are hooked");
                std::thread::sleep(Duration::from_millis(20));
            }
            letting_go.push(asked.elapsed());
            recording.0.wait()?;
            ending.push(asked.elapsed());
        }
        println!(
            "processes: {count} hooked inline within {} (wanted: {WANTED:?}): in {} after the first, which was {} after the \
             start; let go {} after Ctrl-C (wanted: {WANTED:?}), and ended after {}; stopped for {}; {attempts} attempts in \
             {rounds} rounds were repeated (medians; in brackets, the longest)",
            spread(beginning),
            spread(hooking),
            spread(starting),
            spread(letting_go),
            spread(ending),
            spread(stops),
        );
        Ok(())
    }

    /// Repeatedly hooks one process whose threads work from time to time.
    fn threads(&self, context: &Context, count: usize, rounds: usize) -> anyhow::Result<()> {
        let program = workload(context, "enduring")?;
        let target = Running::start(Command::new(program).args(["threads", &count.to_string()]), "READY", false)?;
        let (mut stops, mut attempts, mut refused) = (vec![], 0, 0);
        for _ in 0..rounds {
            let (mut recording, begun) = self.hook(&[target.0.id()])?;
            attempts += begun.attempts;
            refused += usize::from(begun.stops.is_empty());
            stops.extend(begun.stops);
            recording.interrupt()?;
        }
        stops.sort_unstable();
        let p99 = stops.get(stops.len() * 99 / 100).copied().unwrap_or_default();
        println!(
            "threads: a process with {count} threads, hooked {} times: stopped for {}, 99 % of the times for at most {p99:.1?}; \
             {attempts} attempts were repeated, {refused} given up",
            stops.len(),
            spread(stops),
        );
        Ok(())
    }
}

fn is_hooked(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| maps.contains("/memfd:heapbpf-inline"))
}

/// Parses a time as `{:?}` writes it.
fn duration(text: &str) -> Option<Duration> {
    let text = text.trim();
    let digits = text.find(|c: char| !(c.is_ascii_digit() || c == '.'))?;
    let unit = match &text[digits..] {
        "s" => 1.0,
        "ms" => 1e-3,
        "µs" => 1e-6,
        "ns" => 1e-9,
        _ => return None,
    };
    Some(Duration::from_secs_f64(text[..digits].parse::<f64>().ok()? * unit))
}

/// The median and the maximum.
fn spread(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    match (times.get(times.len() / 2), times.last()) {
        (Some(middle), Some(longest)) => format!("{middle:.1?} [{longest:.1?}]"),
        _ => "–".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_they_are_written() {
        for time in [Duration::from_nanos(12), Duration::from_micros(1234), Duration::from_millis(20_107)] {
            assert_eq!(duration(&format!("{time:?}")), Some(time));
        }
        assert_eq!(duration("soon"), None);
    }
}
