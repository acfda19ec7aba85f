//! heapbpf as users run it, daemon and all, against the floor.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use sampler_user::cost::quantiles::{median, spread};
use sampler_user::cost::trial::{Allocator, Floor, Where};
use sampler_user::cost::workload::Workload;

use super::Options;
use super::pinned::Library;

const PAIRS: u64 = 300_000;

/// Measures and prints.
pub fn run(options: &Options, object: &[u8], library: &Library, heapbpf: &Path) -> anyhow::Result<()> {
    let mut workload = library.start(&options.pairs, &["1"])?;
    let allocator = Allocator::of_process(workload.pid())?;
    let mut floor = Floor::load(object)?;
    let pid = workload.pid();
    let mut rows: Vec<(&[&str], Vec<f64>, Vec<f64>)> = vec![
        (&["-i", "512KiB"], vec![], vec![]),
        (&["-i", "512KiB", "--no-live"], vec![], vec![]),
        (&["-i", "0"], vec![], vec![]),
        (&["-i", "4KiB"], vec![], vec![]),
        (&["-i", "1"], vec![], vec![]),
    ];
    for _ in 0..options.rounds.div_ceil(8) {
        for (arguments, ns, to_floor) in &mut rows {
            let mut at_floor = |workload: &mut Workload| -> anyhow::Result<f64> {
                floor.on(&allocator, pid, Where::Everywhere, false)?;
                let spent = workload.run(PAIRS / 2, options.size)?;
                floor.off();
                Ok(spent.cpu_ns as f64 / (PAIRS / 2) as f64)
            };
            let before = at_floor(&mut workload)?;
            let mut running = start(heapbpf, pid, arguments)?;
            let spent = workload.run(PAIRS, options.size)?;
            stop(&mut running)?;
            let after = at_floor(&mut workload)?;
            ns.push(spent.cpu_ns as f64 / PAIRS as f64);
            to_floor.push(spent.cpu_ns as f64 / PAIRS as f64 / (0.5 * (before + after)));
        }
    }
    println!("\n{:<32} {:>9}            of the floor [quartiles]", "the command, per pair", "ns");
    for (arguments, ns, to_floor) in &rows {
        println!("{:<32} {:>9.1}            {}", arguments.join(" "), median(ns), spread(to_floor));
    }
    Ok(())
}

/// Pairs of the daemon's measurement: some seconds' worth.
const DAEMON_PAIRS: u64 = 4_000_000;
/// Mean size of a realistic mix, bytes.
const DAEMON_SIZE: u64 = 1024;
/// Time during which nothing happens.
const QUIET: Duration = Duration::from_secs(5);

/// What the daemon itself uses, busy and quiet.
pub fn daemon(options: &Options, library: &Library, heapbpf: &Path) -> anyhow::Result<()> {
    let mut workload = library.start(&options.pairs, &["1"])?;
    let mut running = start(heapbpf, workload.pid(), &["-i", "512KiB"])?;
    // Loading the files' tables is over when the first samples have been through.
    workload.run(DAEMON_PAIRS / 8, DAEMON_SIZE)?;
    let before = Process::read(running.id())?;
    std::thread::sleep(QUIET);
    let quiet = Process::read(running.id())?;
    let spent = workload.run(DAEMON_PAIRS, DAEMON_SIZE)?;
    let busy = Process::read(running.id())?;
    stop(&mut running)?;
    let seconds = spent.wall_ns as f64 * 1e-9;
    let rate = DAEMON_PAIRS as f64 / seconds;
    println!(
        "\nthe daemon at {:.0} allocations of {DAEMON_SIZE} bytes a second, 512 KiB: {:.2} % of a core ({:.2} % per million a \
         second), {:.1} MiB; quiet: {:.1} wake-ups a second, {:.2} % of a core",
        rate,
        100.0 * (busy.cpu_seconds - quiet.cpu_seconds) / seconds,
        100.0 * (busy.cpu_seconds - quiet.cpu_seconds) / seconds * 1e6 / rate,
        busy.peak_rss_bytes as f64 / 1_048_576.0,
        (quiet.switches - before.switches) as f64 / QUIET.as_secs_f64(),
        100.0 * (quiet.cpu_seconds - before.cpu_seconds) / QUIET.as_secs_f64(),
    );
    Ok(())
}

/// What a process has used so far.
struct Process {
    cpu_seconds: f64,
    switches: u64,
    peak_rss_bytes: u64,
}

impl Process {
    fn read(pid: u32) -> anyhow::Result<Self> {
        let process = procfs::process::Process::new(pid.cast_signed())?;
        let status = process.status()?;
        // schedstat counts nanoseconds, where stat counts clock ticks.
        let cpu_seconds = process.schedstat()?.sum_exec_runtime as f64 * 1e-9;
        let switches = status.voluntary_ctxt_switches.unwrap_or(0);
        Ok(Self { cpu_seconds, switches, peak_rss_bytes: status.vmhwm.unwrap_or(0) * 1024 })
    }
}

/// Starts a recording and waits until its probes are in place.
pub fn start(heapbpf: &Path, pid: u32, arguments: &[&str]) -> anyhow::Result<Child> {
    let folder = tempfile::tempdir()?.keep();
    let mut child = Command::new(heapbpf)
        .args(["--pid", &pid.to_string(), "--quiet", "-o"])
        .arg(folder.join("profile.json"))
        .args(arguments)
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", heapbpf.display()))?;
    let mut lines = BufReader::new(child.stderr.take().context("no standard error")?).lines();
    loop {
        match lines.next() {
            Some(Ok(line)) if line.starts_with("heapbpf: recording") => break,
            Some(Ok(line)) => eprintln!("{line}"),
            _ => bail!("heapbpf ended before it recorded: {}", child.wait()?),
        }
    }
    // What it says later must not block it.
    std::thread::spawn(move || lines.for_each(drop));
    Ok(child)
}

/// Ends a recording as Ctrl-C does.
pub fn stop(child: &mut Child) -> anyhow::Result<()> {
    // SAFETY: a signal to our own child, which was not waited for.
    unsafe { libc::kill(child.id().cast_signed(), libc::SIGINT) };
    let status = child.wait()?;
    if !status.success() {
        bail!("heapbpf failed: {status}");
    }
    Ok(())
}
