//! Many processes that do little: how long a recording of the whole host takes to begin, and what the daemon takes.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::cost::compile;
use super::harness::{Bench, Running, number};
use crate::context::Context;

/// One-line description of the benchmark.
pub const ABOUT: &str =
    "[PROCESSES ACTIVE]: --all at defaults over 1,000 processes: while 50 of them allocate now and then, and after";
/// How long the daemon is watched.
const WATCHED: Duration = Duration::from_secs(30);
/// Time for what happens once.
const SETTLED: Duration = Duration::from_secs(15);

/// Runs the benchmark; needs root.
pub fn run(context: &Context, args: &[String]) -> anyhow::Result<()> {
    let bench = Bench::new(context, "idle")?;
    let (processes, active) = (number(args, 0, 1000_u32)?, number(args, 1, 50)?);
    let program = compile(context, "active", &["-fno-builtin"])?;
    let sleep = |_| Command::new("sleep").arg("600").spawn().map(Running);
    let _resting = (active..processes).map(sleep).collect::<Result<Vec<_>, _>>()?;
    let start = |_| Running::start(&mut Command::new(&program), "READY", false);
    let busy = (0..active).map(start).collect::<anyhow::Result<Vec<_>>>()?;
    let begun = Instant::now();
    let mut recording = bench.record(&["--all"])?;
    println!(
        "idle: {processes} processes, {active} of them active, --all at defaults: {:.0} ms from start until it records \
         (wanted: at most 1000)",
        begun.elapsed().as_secs_f64() * 1e3
    );
    watch(recording.0.id(), "while they are active")?;
    drop(busy);
    watch(recording.0.id(), "after they have ended (wanted: at most 1 %, 10 and 60)")?;
    recording.interrupt()
}

/// Prints what the daemon takes.
fn watch(pid: u32, when: &str) -> anyhow::Result<()> {
    std::thread::sleep(SETTLED);
    let before = (cpu_seconds(pid)?, wake_ups(pid)?);
    std::thread::sleep(WATCHED);
    let seconds = WATCHED.as_secs_f64();
    println!(
        "idle: {when}: the daemon takes {:.2} % of a core, and wakes up {:.1} times a second; resident {:.1} MiB",
        100.0 * (cpu_seconds(pid)? - before.0) / seconds,
        (wake_ups(pid)? - before.1) / seconds,
        status(pid, "VmRSS:")? / 1024.0
    );
    Ok(())
}

/// User and system time that a process has used so far.
fn cpu_seconds(pid: u32) -> anyhow::Result<f64> {
    // proc_pid_stat(5): fields 14 and 15, in ticks of 1/100 s on every Linux that heapbpf runs on.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let rest = stat.rsplit(')').next().context("a name in parentheses")?;
    let ticks = |i: usize| rest.split_whitespace().nth(i).and_then(|word| word.parse::<f64>().ok()).unwrap_or(0.0);
    Ok((ticks(11) + ticks(12)) / 100.0)
}

/// How often the first thread of a process has waited so far.
fn wake_ups(pid: u32) -> anyhow::Result<f64> {
    status(pid, "voluntary_ctxt_switches:")
}

/// A number of `/proc/PID/status`.
fn status(pid: u32, name: &str) -> anyhow::Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let value = status.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse::<f64>().ok());
    value.with_context(|| format!("no {name}"))
}
