//! Many processes that do little: how long a recording of the whole host takes to begin, what the daemon takes, how
//! long a scrape takes, how long hooking half of them inline takes, and letting them go; and the CPU time for residency.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::cost::compile;
use super::harness::{Bench, Running, get, number, spread};
use crate::context::Context;

/// One-line description of the benchmark.
pub const ABOUT: &str = "[PROCESSES ACTIVE]: 1,000 processes, of which 50 allocate now and then: --all at defaults, and after they have ended; a scrape of /metrics; hooking 500 inline; residency of sampled blocks";
/// How long the daemon is watched.
const WATCHED: Duration = Duration::from_secs(30);
/// Time for what happens once.
const SETTLED: Duration = Duration::from_secs(15);
/// Processes that are not hooked within this time stay so.
const GIVEN_UP: Duration = Duration::from_secs(60);

/// Runs the benchmark; needs root.
pub fn run(context: &Context, args: &[String]) -> anyhow::Result<()> {
    let bench = Bench::new(context, "processes")?;
    let (processes, active) = (number(args, 0, 1000_u32)?, number(args, 1, 50_u32)?);
    let program = compile(context, "active", &["-fno-builtin"])?;
    let mut resting = sleeping(processes - active)?;
    let start = |_: u32| Running::start(&mut Command::new(&program), "READY", false);
    let busy = (0..active).map(start).collect::<anyhow::Result<Vec<_>>>()?;
    let begun = Instant::now();
    let mut recording = bench.record(&["--all"])?;
    println!(
        "{processes} processes, {active} of them active, --all at defaults: {:.0} ms from start until it records \
         (wanted: at most 1000)",
        begun.elapsed().as_secs_f64() * 1e3
    );
    watch(recording.0.id(), "while they are active")?;
    drop(busy);
    watch(recording.0.id(), "after they have ended (wanted: at most 1 %, 10 and 60)")?;
    recording.interrupt()?;
    resting.extend(sleeping(active)?);
    scrape(&bench, resting.len())?;
    drop(resting);
    hook(&bench, processes / 2)?;
    super::run_program::<&str>(context, "heapbpf-bench-residency", &[])
}

/// Starts processes that do nothing.
fn sleeping(count: u32) -> std::io::Result<Vec<Running>> {
    (0..count).map(|_| Command::new("sleep").arg("600").spawn().map(Running)).collect()
}

/// Prints how long a scrape of a service takes that records the host, on which this many processes do nothing.
fn scrape(bench: &Bench, processes: usize) -> anyhow::Result<()> {
    let (mut service, address) = bench.serve(&["serve", "--all"])?;
    std::thread::sleep(SETTLED);
    // The first scrape discovers what there is.
    get(&address, "/metrics")?;
    let (mut times, mut series, before) = (Vec::new(), 0, used(service.0.id())?[0]);
    for _ in 0..21 {
        // Scrapers wait as well. In that time, memory is measured again.
        std::thread::sleep(Duration::from_secs(1));
        let begun = Instant::now();
        let answer = get(&address, "/metrics")?;
        times.push(begun.elapsed().as_secs_f64() * 1e3);
        series = answer.lines().filter(|line| line.starts_with("heapbpf_")).count();
        ensure!(series > 0, "this has no series: {answer}");
    }
    let cpu_ms = 1e3 * (used(service.0.id())?[0] - before) / times.len() as f64;
    println!(
        "/metrics: {processes} idle processes, {series} series: {} ms (wanted: at most 50), and {cpu_ms:.0} ms of the \
         daemon's CPU time for each refresh of the table, with the second before it (wanted: at most 60)",
        spread(times)
    );
    let mib = |name| status(service.0.id(), name).map(|kib| kib / 1024.0);
    let (resident, peak) = (mib("VmRSS:")?, mib("VmHWM:")?);
    println!("serve --all: resident {resident:.1} MiB, at its peak {peak:.1} MiB (wanted: at most 120)");
    service.interrupt()
}

/// Prints how long hooking this many processes inline takes, and letting them go. Each round has new ones, because the
/// hooks' code stays in a process that is let go.
fn hook(bench: &Bench, count: u32) -> anyhow::Result<()> {
    let (mut beginning, mut ending) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        let processes = sleeping(count)?;
        let mut pids: Vec<u32> = processes.iter().map(|process| process.0.id()).collect();
        let maps = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        let list = pids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let begun = Instant::now();
        let mut recording = bench.record(&["--hook", "inline", "--no-follow", "-i", "512KiB", "--pid", &list])?;
        // Whoever reads the mappings of a process holds up who changes them: each process is looked at until it is hooked.
        while let Some(pid) = pids.last() {
            ensure!(begun.elapsed() < GIVEN_UP, "{} of {count} are not hooked", pids.len());
            if maps(pid).contains("/memfd:heapbpf-inline") {
                pids.pop();
            } else {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        beginning.push(begun.elapsed().as_secs_f64());
        let asked = Instant::now();
        recording.interrupt()?;
        ending.push(asked.elapsed().as_secs_f64());
    }
    let (beginning, ending) = (spread(beginning), spread(ending));
    println!("{count} processes: hooked inline in {beginning} s, ended {ending} s after Ctrl-C (wanted: at most 5)");
    Ok(())
}

/// Prints what the daemon takes.
fn watch(pid: u32, when: &str) -> anyhow::Result<()> {
    std::thread::sleep(SETTLED);
    let before = used(pid)?;
    std::thread::sleep(WATCHED);
    let (after, seconds) = (used(pid)?, WATCHED.as_secs_f64());
    println!(
        "{when}: the daemon takes {:.2} % of a core, and wakes up {:.1} times a second; resident {:.1} MiB",
        100.0 * (after[0] - before[0]) / seconds,
        (after[1] - before[1]) / seconds,
        status(pid, "VmRSS:")? / 1024.0
    );
    Ok(())
}

/// User and system time that a process has used so far, seconds, and how often its first thread has waited.
fn used(pid: u32) -> anyhow::Result<[f64; 2]> {
    // proc_pid_stat(5): fields 14 and 15, in ticks of 1/100 s on every Linux that heapbpf runs on.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, rest) = stat.rsplit_once(')').context("a name in parentheses")?;
    let ticks: f64 = rest.split_whitespace().skip(11).take(2).flat_map(str::parse::<f64>).sum();
    Ok([ticks / 100.0, status(pid, "voluntary_ctxt_switches:")?])
}

/// A number of `/proc/PID/status`.
fn status(pid: u32, name: &str) -> anyhow::Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let value = status.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse::<f64>().ok());
    value.with_context(|| format!("no {name}"))
}
