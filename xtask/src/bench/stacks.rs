//! Stacks: the cost of copying and unwinding one, and how many a daemon can process.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};

use super::cost::compile;
use super::harness::{Bench, Running};
use crate::context::Context;
use crate::shell::run as run_command;

/// One-line description of the benchmark.
pub const ABOUT: &str =
    "copy | unwind | daemon | rate: stacks in the kernel, in the daemon, below a thread that allocates at full speed";

/// Runs one of the four parts, or all of them; all but `unwind` need root.
pub fn run(context: &Context, args: &[String]) -> anyhow::Result<()> {
    let unwind = || super::run_program::<&str>(context, "heapbpf-bench-unwind", &[]);
    let bench = || Bench::new(context, "stacks");
    match args.first().map(String::as_str) {
        Some("copy") => copy(context),
        Some("unwind") => unwind(),
        Some("daemon") => daemon(context, &bench()?),
        Some("rate") => rate(context, &bench()?),
        None => {
            let bench = bench()?;
            copy(context)?;
            unwind()?;
            daemon(context, &bench)?;
            rate(context, &bench)
        }
        Some(other) => bail!("{other:?} is none of copy, unwind, daemon, rate"),
    }
}

/// The cost that a stack copy adds to a sample, by the size of the copy.
fn copy(context: &Context) -> anyhow::Result<()> {
    let pairs = compile(context, "pair_loop", &[])?;
    let program = super::build_program(context, "heapbpf-bench-cost")?;
    run_command(Command::new(program).arg("--stacks").arg("--pairs").arg(pairs), context.options.verbose)
}

/// Measures real programs at a high sampling rate: how many samples the daemon unwinds, adds and symbolizes per second of
/// its CPU time.
fn daemon(context: &Context, bench: &Bench) -> anyhow::Result<()> {
    let tests = context.root.join("tests");
    let json_loop = tests.join("programs/json_loop.py").display().to_string();
    let fill = format!(".read {}", tests.join("fixtures/fill.sql").display());
    let programs: [(&str, Vec<&str>, &str); 2] =
        [("/usr/bin/python3", vec![&json_loop, "2000"], "1KiB"), ("/usr/bin/sqlite3", vec![":memory:", &fill], "64")];
    for (program, words, interval) in programs {
        if !Path::new(program).exists() {
            println!("daemon: skipped: {program} is not installed");
            continue;
        }
        let mut command = bench.command(&["-q", "-i", interval]);
        command.args(["--", program]).args(&words).env("FREE_RUNNING", "1").stdout(Stdio::null());
        let status = command.status()?;
        ensure!(status.success(), "{command:?}: {status}");
        let value = bench.stats()?;
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
fn rate(context: &Context, bench: &Bench) -> anyhow::Result<()> {
    let program = compile(context, "pair_loop", &[])?;
    let (mut pairs, _) = Running::start(Command::new(program).args(["1", "300"]), "READY", false)?;
    let pid = pairs.0.id().to_string();
    let mut recording = bench.record(&["-i", "512KiB", "-p", &pid])?;
    let begun = Instant::now();
    pairs.write("run 3000000 16384")?;
    // The answer is not read: the process's state shows when it has finished the work.
    std::thread::sleep(Duration::from_secs(1));
    while fs::read_to_string(format!("/proc/{pid}/stat"))?.contains(") R") {
        std::thread::sleep(Duration::from_millis(5));
    }
    let seconds = begun.elapsed().as_secs_f64();
    recording.interrupt()?;
    let value = bench.stats()?;
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
