//! Many processes: how long attaching takes, what many short-lived processes cost, and what memory remains after they
//! exit.

use std::collections::HashSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use super::host::get;
use super::scratch::{Dir, Running};
use crate::context::Context;
use crate::root::Privilege;
use crate::shell::read;

/// One-line description of the benchmark.
pub const ABOUT: &str = "attach [PROCESSES FILES] | storm [RATE SECONDS] | remains [COUNT] [serve] | metrics [COUNT] | idle [PROCESSES ACTIVE]: attaching to many, short lives, what they leave, what a scrape takes, many that do little; attach and storm with --hook auto and probe, the others at defaults";

/// Ways to count calls that are measured.
const HOOKS: [&str; 2] = ["auto", "probe"];

/// Runs one of the parts; needs root.
pub fn run(context: &Context, args: &[String]) -> anyhow::Result<()> {
    ensure!(
        matches!(context.privilege, Privilege::Root),
        "this benchmark runs as root: sudo cargo xtask bench processes"
    );
    let number = |i: usize, otherwise: u64| args.get(i).map_or(Ok(otherwise), |text| text.parse::<u64>());
    let bench = Bench::new(context)?;
    match args.first().map(String::as_str) {
        Some("attach") => bench.attach(number(1, 300)?, number(2, 40)?),
        Some("storm") => bench.storm(number(1, 500)?, number(2, 30)?),
        Some("remains") => bench.remains(number(1, 50_000)?, args.get(2).is_some_and(|mode| mode == "serve")),
        Some("metrics") => bench.metrics(number(1, 1000)?),
        Some("idle") => bench.idle(number(1, 1000)?, number(2, 50)?),
        None => {
            bench.attach(300, 40)?;
            bench.storm(500, 30)?;
            bench.metrics(1000)?;
            bench.idle(1000, 50)?;
            bench.remains(50_000, false)?;
            bench.remains(50_000, true)
        }
        Some(other) => bail!("{other:?} is none of attach, storm, remains, metrics, idle"),
    }
}

struct Bench {
    dir: Dir,
    heapbpf: PathBuf,
}

/// Memory of heapbpf and its maps, bytes: anonymous memory, without the rings, whose pages are allocated on first use.
#[derive(Clone, Copy)]
struct Memory {
    daemon: u64,
    maps: u64,
}

impl Bench {
    fn new(context: &Context) -> anyhow::Result<Self> {
        let dir = Dir::new()?;
        let heapbpf = std::env::var_os("HEAPBPF_BIN").map_or_else(|| context.binary(), PathBuf::from);
        ensure!(heapbpf.exists(), "no {}: cargo xtask build makes it", heapbpf.display());
        let bench = Self { dir, heapbpf };
        let source = context.root.join("tests/programs/storm.c");
        for (name, flags) in [("storm", &[][..]), ("static", &["-static"])] {
            let mut compile = Command::new("cc");
            read(compile.args(["-O2", "-fno-builtin", "-o"]).arg(bench.path(name)).arg(&source).args(flags))?;
        }
        Ok(bench)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts heapbpf on the whole host. Returns the time until it recorded.
    fn record(&self, arguments: &[&str]) -> anyhow::Result<(Running, Duration)> {
        let begun = Instant::now();
        let mut command = Command::new(&self.heapbpf);
        command.args(arguments).args(["--all", "-q", "--force", "-o"]).arg(self.path("profile.json")).arg("--stats");
        command.arg(self.path("stats.json")).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = Running(command.spawn()?);
        let errors = child.0.stderr.take().context("piped")?;
        let mut lines = BufReader::new(errors).lines();
        for line in &mut lines {
            let line = line?;
            if line.starts_with("heapbpf: recording") {
                let elapsed = begun.elapsed();
                println!("{}", line.trim_start_matches("heapbpf: "));
                // Later output is discarded, so that a full pipe does not block it.
                std::thread::spawn(move || lines.for_each(drop));
                return Ok((child, elapsed));
            }
            eprintln!("{line}");
        }
        bail!("heapbpf did not begin to record")
    }

    /// Ends the recording and waits until its files are written.
    fn finish(&self, mut recording: Running) -> anyhow::Result<String> {
        recording.interrupt()?;
        Ok(fs::read_to_string(self.path("stats.json"))?)
    }

    fn attach(&self, processes: u64, files: u64) -> anyhow::Result<()> {
        let mut running = Vec::new();
        for i in 0..processes {
            // Static programs, so that each file is a separate allocator.
            let program = self.path(&format!("allocator-{}", i % files));
            if i < files {
                fs::copy(self.path("static"), &program)?;
            }
            let mut child = Command::new(&program).arg("rest").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
            BufReader::new(child.stdout.take().context("piped")?).read_line(&mut String::new())?;
            running.push(Running(child));
        }
        for hook in HOOKS {
            let mut times = Vec::new();
            for _ in 0..5 {
                let (recording, elapsed) = self.record(&["--hook", hook, "-i", "0"])?;
                times.push((elapsed, cpu_seconds(recording.0.id())?));
                self.finish(recording)?;
            }
            times.sort_by_key(|(elapsed, _)| *elapsed);
            println!(
                "attach, --hook {hook}: {processes} processes, {files} allocator files: {:.0} ms from start until it \
                 records (with probes, to the last one), {:.0} ms of CPU time (median of 5)",
                times[2].0.as_secs_f64() * 1e3,
                times[2].1 * 1e3
            );
        }
        Ok(())
    }

    /// Scrapes `/metrics` of a service that records the whole host, on which this many idle processes run.
    fn metrics(&self, processes: u64) -> anyhow::Result<()> {
        const SCRAPES: usize = 20;
        let sleep = || Command::new("sleep").arg("600").spawn().map(Running);
        let _idle = (0..processes).map(|_| sleep()).collect::<Result<Vec<_>, _>>()?;
        // A port that was free just now.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
        let (recording, _) = self.record(&["serve", "--listen", &address])?;
        let pid = recording.0.id();
        // Warm-up: the first scrapes discover what there is.
        for _ in 0..3 {
            get(&address, "/metrics")?;
        }
        let (mut times, before, mut series) = (Vec::new(), cpu_seconds(pid)?, 0);
        for _ in 0..SCRAPES {
            let begun = Instant::now();
            let answer = get(&address, "/metrics")?;
            times.push(begun.elapsed());
            series = answer.lines().filter(|line| line.starts_with("heapbpf_")).count();
            // Scrapers wait as well. In that time, memory is measured again.
            std::thread::sleep(Duration::from_secs(1));
        }
        let used = cpu_seconds(pid)? - before;
        times.sort_unstable();
        println!(
            "metrics: {processes} idle processes, {series} series: median {:.1} ms, longest {:.1} ms of {SCRAPES}; {:.1} ms of the \
             daemon's CPU time for a scrape and the second after it",
            times[SCRAPES / 2].as_secs_f64() * 1e3,
            times[SCRAPES - 1].as_secs_f64() * 1e3,
            used / SCRAPES as f64 * 1e3
        );
        self.finish(recording).map(drop)
    }

    /// Runs `count` short processes, `rate` a second. Every 25th of them lives for 150 ms. Returns the PIDs of those,
    /// and the time taken in seconds.
    fn short_lives(&self, rate: u64, count: u64) -> anyhow::Result<(Vec<u64>, f64)> {
        fs::copy(self.path("storm"), self.path("long-lived"))?;
        let mut storm = Command::new(self.path("storm"));
        storm.args([rate.to_string(), count.to_string(), "25".into()]);
        let said = read(storm.arg(self.path("storm")).arg(self.path("long-lived")))?;
        let mut words = said.split_whitespace();
        let seconds = words.next().context("the storm says how long it took")?.parse()?;
        Ok((words.map(str::parse).collect::<Result<_, _>>()?, seconds))
    }

    /// Starts many processes that do nothing, and some that allocate now and then. Measures how long a recording of the
    /// whole host takes to begin, and what the daemon takes while some are active, and once none is.
    fn idle(&self, processes: u64, active: u64) -> anyhow::Result<()> {
        const OBSERVED: Duration = Duration::from_secs(30);
        const SETTLED: Duration = Duration::from_secs(15);
        let sleep = || Command::new("sleep").arg("600").spawn().map(Running);
        let _resting = (active..processes).map(|_| sleep()).collect::<Result<Vec<_>, _>>()?;
        let start = || Running::start(Command::new(self.path("storm")).arg("active"), "READY", false);
        let busy = (0..active).map(|_| start()).collect::<anyhow::Result<Vec<_>>>()?;
        let (recording, elapsed) = self.record(&[])?;
        let pid = recording.0.id();
        let observe = |when: &str| -> anyhow::Result<()> {
            std::thread::sleep(SETTLED);
            let before = (cpu_seconds(pid)?, wake_ups(pid)?);
            std::thread::sleep(OBSERVED);
            let seconds = OBSERVED.as_secs_f64();
            println!(
                "idle: {when}: the daemon takes {:.2} % of a core, and wakes up {:.1} times a second; resident {:.1} MiB",
                100.0 * (cpu_seconds(pid)? - before.0) / seconds,
                (wake_ups(pid)? - before.1) as f64 / seconds,
                resident(pid)? as f64 / f64::from(1 << 20)
            );
            Ok(())
        };
        println!(
            "idle: {processes} processes, {active} of them active, --all at defaults: {:.0} ms from start until it \
             records (wanted: at most 1000)",
            elapsed.as_secs_f64() * 1e3
        );
        observe("while they are active")?;
        drop(busy);
        observe("after they have ended (wanted: at most 1 %, 10 and 60)")?;
        self.finish(recording).map(drop)
    }

    fn storm(&self, rate: u64, seconds: u64) -> anyhow::Result<()> {
        HOOKS.iter().try_for_each(|hook| self.storm_with(hook, rate, seconds))
    }

    fn storm_with(&self, hook: &str, rate: u64, seconds: u64) -> anyhow::Result<()> {
        let (recording, _) = self.record(&["--hook", hook, "-i", "512KiB", "--max-overhead", "none"])?;
        let before = cpu_seconds(recording.0.id())?;
        let (longs, took) = self.short_lives(rate, rate * seconds)?;
        let used = cpu_seconds(recording.0.id())? - before;
        let stats = self.finish(recording)?;
        let profile = fs::read_to_string(self.path("profile.json"))?;
        let mut seen: HashSet<u64> = sampled(&profile, "long-lived")?;
        let found = longs.iter().filter(|pid| seen.remove(pid)).count();
        println!(
            "storm, --hook {hook}: {} processes in {took:.1} s ({:.0}/s): daemon {:.1} % of a core; of {} that lived 150 ms, {found} were \
             seen allocating in their last 50 ms; host events lost {}",
            rate * seconds,
            (rate * seconds) as f64 / took,
            100.0 * used / took,
            longs.len(),
            field(&stats, "host_events_lost").unwrap_or("?")
        );
        Ok(())
    }

    /// Measures memory after each fifth of `count` short processes, once the state that is kept for a while after an
    /// exit is gone. Uses one recording, or `heapbpf serve`.
    fn remains(&self, count: u64, serve: bool) -> anyhow::Result<()> {
        const STEPS: u64 = 5;
        let serving: &[&str] = if serve { &["serve", "--listen", "127.0.0.1:0"] } else { &[] };
        let (recording, _) = self.record(&[serving, &["-i", "512KiB"]].concat())?;
        let pid = recording.0.id();
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        println!("| short processes | a second | daemon, MiB | kernel maps, MiB |\n|---|---|---|---|");
        // The first processes make the daemon keep files and names, which are not state of these processes.
        let steps = std::iter::once((500, 500)).chain((0..STEPS).map(|_| (100_000, count / STEPS)));
        let mut before = 0;
        for (step, (rate, processes)) in steps.enumerate() {
            let (_, took) = self.short_lives(rate, processes)?;
            std::thread::sleep(Duration::from_secs(30));
            let Memory { daemon, maps } = memory(pid)?;
            let so_far = if step == 0 { 0 } else { step as u64 * (count / STEPS) };
            println!("| {so_far} | {:.0} | {:.1} | {:.2} |", processes as f64 / took, mib(daemon), mib(maps));
            if step == 0 {
                before = daemon;
            } else if step as u64 == STEPS {
                println!("remains: after {so_far} processes {:+.1} MiB", mib(daemon) - mib(before));
            }
        }
        self.finish(recording).map(drop)
    }
}

/// Returns the PIDs of the processes with this name that have samples in a profile.
fn sampled(profile: &str, name: &str) -> anyhow::Result<HashSet<u64>> {
    let profile: serde_json::Value = serde_json::from_str(profile)?;
    let list = |key: &str| profile[key].as_array().cloned().unwrap_or_default();
    let with_samples: HashSet<u64> = list("stacks").iter().filter_map(|stack| stack["process"].as_u64()).collect();
    let processes = list("processes");
    let named = (0..).zip(&processes).filter(|(i, process)| process["comm"] == name && with_samples.contains(i));
    Ok(named.filter_map(|(_, process)| process["pid"].as_u64()).collect())
}

/// User and system time that a process has used so far.
fn cpu_seconds(pid: u32) -> anyhow::Result<f64> {
    // proc_pid_stat(5): fields 14 and 15, in ticks of 1/100 s on every Linux that heapbpf runs on.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let rest = stat.rsplit(')').next().context("a name in parentheses")?;
    let ticks = |i: usize| rest.split_whitespace().nth(i).and_then(|word| word.parse::<f64>().ok()).unwrap_or(0.0);
    Ok((ticks(11) + ticks(12)) / 100.0)
}

/// A number of `/proc/PID/status`.
fn status(pid: u32, name: &str) -> anyhow::Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    value.and_then(|value| value.split_whitespace().next()?.parse().ok()).with_context(|| format!("no {name}"))
}

/// Resident memory of a process, bytes.
fn resident(pid: u32) -> anyhow::Result<u64> {
    Ok(status(pid, "VmRSS")? * 1024)
}

/// How often the first thread of a process has waited so far.
fn wake_ups(pid: u32) -> anyhow::Result<u64> {
    status(pid, "voluntary_ctxt_switches")
}

fn memory(pid: u32) -> anyhow::Result<Memory> {
    let kib = |text: &str| text.split_whitespace().next().and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
    let daemon = status(pid, "RssAnon")? * 1024;
    let mut maps = 0;
    for entry in fs::read_dir(Path::new("/proc").join(pid.to_string()).join("fdinfo"))? {
        let text = entry.and_then(|entry| fs::read_to_string(entry.path())).unwrap_or_default();
        // In bytes; only BPF maps have this field.
        if text.contains("map_type:") {
            maps += text.lines().find_map(|line| line.strip_prefix("memlock:")).map_or(0, kib);
        }
    }
    Ok(Memory { daemon, maps })
}

/// Returns a number in a JSON text, by its name.
fn field<'a>(json: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = json.split_once(&format!("\"{name}\":"))?;
    rest.split([',', '}', '\n']).next().map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_of_json() {
        let json = "{\n  \"host_events_lost\": 12,\n  \"last\": 3\n}";
        assert_eq!(field(json, "host_events_lost"), Some("12"));
        assert_eq!(field(json, "last"), Some("3"));
        assert_eq!(field(json, "none"), None);
    }
}
