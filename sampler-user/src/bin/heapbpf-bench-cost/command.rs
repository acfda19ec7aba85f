//! heapbpf as users run it, daemon and all, against the floor.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail};
use sampler_user::cost::trial::{Allocator, Floor, Where};
use sampler_user::cost::workload::Workload;

use super::Options;
use super::pinned::Library;
use super::ratios::{median, spread};

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
