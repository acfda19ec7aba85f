//! Stacks: the cost of copying and unwinding one, how many a daemon can process, and how much memory that takes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};

use super::cost::workload;
use super::scratch::{Dir, Running};
use crate::context::Context;
use crate::root::Privilege;
use crate::shell::{read, run as run_command};

/// One-line description of the benchmark.
pub const ABOUT: &str =
    "copy | unwind | daemon | memory [PROCESSES MODULES] | rate: stacks in the kernel, in the daemon, of a whole host";

/// Runs one of the five parts, or all of them; all but `unwind` need root.
pub fn run(context: &Context, args: &[String]) -> anyhow::Result<()> {
    let number = |i: usize, otherwise: u64| args.get(i).map_or(Ok(otherwise), |text| text.parse::<u64>());
    let word = args.first().map(String::as_str);
    ensure!(
        word == Some("unwind") || matches!(context.privilege, Privilege::Root),
        "this benchmark runs as root: sudo cargo xtask bench stacks"
    );
    match word {
        Some("copy") => copy(context),
        Some("unwind") => super::run_program(context, "heapbpf-bench-unwind", &[]),
        Some("daemon") => Bench::new(context)?.daemon(),
        Some("memory") => Bench::new(context)?.memory(number(1, 200)?, number(2, 30)?),
        Some("rate") => Bench::new(context)?.rate(context),
        None => {
            copy(context)?;
            super::run_program(context, "heapbpf-bench-unwind", &[])?;
            let bench = Bench::new(context)?;
            bench.daemon()?;
            bench.rate(context)?;
            bench.memory(200, 30)
        }
        Some(other) => bail!("{other:?} is none of copy, unwind, daemon, memory, rate"),
    }
}

/// The cost that a stack copy adds to a sample, by the size of the copy.
fn copy(context: &Context) -> anyhow::Result<()> {
    let pairs = workload(context, "pair_loop")?;
    let program = super::build_program(context, "heapbpf-bench-cost")?;
    run_command(Command::new(program).arg("--stacks").arg("--pairs").arg(pairs), context.options.verbose)
}

struct Bench {
    dir: Dir,
    heapbpf: PathBuf,
    sources: PathBuf,
}

impl Bench {
    fn new(context: &Context) -> anyhow::Result<Self> {
        let dir = Dir::new()?;
        let heapbpf = std::env::var_os("HEAPBPF_BIN").map_or_else(|| context.binary(), PathBuf::from);
        ensure!(heapbpf.exists(), "no {}: cargo xtask build makes it", heapbpf.display());
        Ok(Self { dir, heapbpf, sources: context.root.join("tests/programs") })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn heapbpf(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.heapbpf);
        command.args(["-q", "--force", "-o"]).arg(self.path("profile.json")).arg("--stats");
        command.arg(self.path("stats.json")).args(arguments);
        command
    }

    fn stats(&self) -> anyhow::Result<String> {
        Ok(fs::read_to_string(self.path("stats.json"))?)
    }

    /// Measures real programs at a high sampling rate: how many samples the daemon unwinds, adds and symbolizes per
    /// second of its CPU time.
    fn daemon(&self) -> anyhow::Result<()> {
        let json_loop = self.sources.join("json_loop.py").display().to_string();
        let fill = format!(".read {}", self.sources.join("../fixtures/fill.sql").display());
        let programs: [(&str, Vec<&str>, &str); 2] = [
            ("/usr/bin/python3", vec![&json_loop, "2000"], "1KiB"),
            ("/usr/bin/sqlite3", vec![":memory:", &fill], "64"),
        ];
        for (program, words, interval) in programs {
            if !Path::new(program).exists() {
                println!("daemon: skipped: {program} is not installed");
                continue;
            }
            let mut command = self.heapbpf(&["-i", interval, "--"]);
            let status = command.arg(program).args(&words).env("FREE_RUNNING", "1").stdout(Stdio::null()).status()?;
            ensure!(status.success(), "{command:?}: {status}");
            let stats = self.stats()?;
            let value = |name: &str| field(&stats, name).and_then(|text| text.parse::<f64>().ok()).unwrap_or(f64::NAN);
            let (samples, cpu) = (value("submitted"), value("daemon_cpu_seconds"));
            println!(
                "daemon: {program}, one sample per {interval}: {samples} samples, {:.1} % of stacks whole, {:.1} % repeated; \
                 {cpu:.2} s of CPU time with loading and naming, {:.0} samples per second of it; stacks lost {}, peak RSS {:.0} MiB",
                100.0 * value("stacks_complete") / value("stacks_unwound"),
                100.0 * value("stacks_repeated") / value("stacks_unwound"),
                samples / cpu,
                value("stacks_lost"),
                value("daemon_peak_rss_bytes") / f64::from(1 << 20),
            );
        }
        Ok(())
    }

    /// One thread allocates at full speed, with one sample per 512 KiB. No sample may be lost.
    fn rate(&self, context: &Context) -> anyhow::Result<()> {
        let mut pairs =
            Running::start(Command::new(workload(context, "pair_loop")?).args(["1", "300"]), "READY", false)?;
        let pid = pairs.0.id().to_string();
        let mut recording =
            Running::start(&mut self.heapbpf(&["-i", "512KiB", "-p", &pid]), "heapbpf: recording", true)?;
        let begun = Instant::now();
        pairs.write("run 3000000 16384")?;
        // The answer is not read: the process's state shows when it has finished the work.
        std::thread::sleep(Duration::from_secs(1));
        while fs::read_to_string(format!("/proc/{pid}/stat"))?.contains(") R") {
            std::thread::sleep(Duration::from_millis(5));
        }
        let seconds = begun.elapsed().as_secs_f64();
        recording.interrupt()?;
        let stats = self.stats()?;
        let value = |name: &str| field(&stats, name).and_then(|text| text.parse::<f64>().ok()).unwrap_or(f64::NAN);
        println!(
            "rate: {:.2} GB/s for {seconds:.1} s below 300 calls (copies of 50 KiB): {} samples; lost: {} for lack of space, \
             {} stacks",
            value("exact_alloc_bytes") / seconds / 1e9,
            value("submitted"),
            value("ring_full"),
            value("stacks_lost"),
        );
        Ok(())
    }

    /// Many processes with many modules each: measures the memory that the daemon needs to track, unwind and symbolize
    /// all of them.
    fn memory(&self, processes: u64, modules: u64) -> anyhow::Result<()> {
        // Twice as many libraries as one process has, so that each process loads a different selection.
        let pool = 2 * modules;
        for i in 0..pool {
            let source = self.path(&format!("m{i}.c"));
            fs::write(
                &source,
                format!("#include <stdlib.h>\nvoid *take_{i}(size_t n) {{ return malloc(n + {i}); }}\n"),
            )?;
            let mut compile = Command::new("cc");
            compile.args(["-O1", "-g", "-shared", "-fPIC", "-o"]).arg(self.path(&format!("libm{i}.so"))).arg(source);
            read(&mut compile)?;
        }
        let program = self.path("modules");
        read(
            Command::new("cc").args(["-O1", "-g", "-o"]).arg(&program).arg(self.sources.join("modules.c")).arg("-ldl"),
        )?;
        let mut running = Vec::new();
        for i in 0..processes {
            let mut command = Command::new(&program);
            command.arg(self.path("libm").as_os_str()).args([i, modules, pool].map(|n| n.to_string()));
            running.push(Running::start(&mut command, "READY", false)?);
        }
        let options = ["--all", "--max-overhead", "none"];
        let mut recording = Running::start(&mut self.heapbpf(&options), "heapbpf: recording", true)?;
        let pid = recording.0.id();
        let idle = Memory::of(pid)?;
        for process in &mut running {
            process.write("go")?;
        }
        std::thread::sleep(Duration::from_secs(15));
        let sampled = Memory::of(pid)?;
        recording.interrupt()?;
        let stats = self.stats()?;
        let profile = fs::read_to_string(self.path("profile.json"))?;
        println!(
            "memory: {processes} processes of {modules} modules: {} samples, {} stacks in the profile",
            field(&stats, "submitted").unwrap_or("?"),
            profile.matches("\"frames\"").count()
        );
        println!("memory: attached:  {idle}");
        println!("memory: sampled:   {sampled}");
        let peak = field(&stats, "daemon_peak_rss_bytes").and_then(|text| text.parse::<f64>().ok()).unwrap_or(f64::NAN);
        println!("memory: peak RSS, names and profile included: {:.0} MiB", peak / f64::from(1 << 20));
        Ok(())
    }
}

/// Resident memory of a process by kind, KiB.
struct Memory {
    anonymous: u64,
    file: u64,
    shared: u64,
}

impl Memory {
    fn of(pid: u32) -> anyhow::Result<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let kib = |name: &str| {
            let value =
                status.lines().find_map(|line| line.strip_prefix(name)).and_then(|line| line.split_whitespace().next());
            value.and_then(|value| value.parse().ok()).unwrap_or(0)
        };
        Ok(Self { anonymous: kib("RssAnon:"), file: kib("RssFile:"), shared: kib("RssShmem:") })
    }
}

impl std::fmt::Display for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mib = |kib: u64| kib as f64 / 1024.0;
        let all = mib(self.anonymous + self.file + self.shared);
        let (anonymous, file, shared) = (mib(self.anonymous), mib(self.file), mib(self.shared));
        write!(f, "RSS {all:.0} MiB: anonymous {anonymous:.0}, files {file:.0}, shared {shared:.0}")
    }
}

/// Returns a number in a JSON text, by its name.
fn field<'a>(json: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = json.split_once(&format!("\"{name}\":"))?;
    rest.split([',', '}', '\n']).next().map(str::trim)
}
