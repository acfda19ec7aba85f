//! The cost of a malloc/free pair under inline hooks, against the same pair without anything.

use std::path::Path;
use std::time::Duration;

use sampler_user::cost::quantiles::{median, spread};
use sampler_user::cost::workload::Workload;

use super::Options;
use super::command::{start, stop};
use super::pinned::Library;

/// Pairs of a slice, of each thread: some tens of milliseconds.
const PAIRS: u64 = 4_000_000;
/// Slices of one measurement, of which the median counts.
const SLICES: usize = 5;
/// A daemon that used no CPU time for that long is through with starting. Until then it takes the execution units that its
/// core shares with another one, and a pair takes up to twice as long there.
const STILL: Duration = Duration::from_millis(300);
/// The longest wait for that.
const STILL_TRIES: usize = 30;
/// Numbers of threads.
const THREADS: [&str; 2] = ["1", "4"];
const INTERVALS: [&str; 3] = ["512KiB", "64KiB", "0"];

/// Measures and prints a pair with `--hook inline`, for several intervals and numbers of threads.
pub fn run(options: &Options, library: &Library, heapbpf: &Path) -> anyhow::Result<()> {
    println!("\n{:<32} {:>9} {:>9}  of bare [quartiles]", "inline hooks, per pair", "bare ns", "ns");
    for threads in THREADS {
        let mut workload = library.start(&options.pairs, &[threads])?;
        for interval in INTERVALS {
            row(options, &mut workload, (threads, interval), heapbpf)?;
        }
    }
    sampled(options, library, heapbpf)
}

/// An interval at which enough is sampled to tell it from the rest of a pair, and the daemon keeps up.
const SAMPLED_INTERVAL: u32 = 4096;
/// Pairs of a slice: their samples find room in the ring.
const SAMPLED_PAIRS: u64 = 40_000;
const SAMPLED_SLICES: usize = 15;
/// Time for the daemon to empty the ring.
const BETWEEN: Duration = Duration::from_millis(30);

/// Measures and prints what a sampled allocation takes, with its stack: what a pair takes more than where nothing is sampled, by
/// the share of pairs that are.
fn sampled(options: &Options, library: &Library, heapbpf: &Path) -> anyhow::Result<()> {
    let mut workload = library.start(&options.pairs, &["1"])?;
    let interval = SAMPLED_INTERVAL.to_string();
    let rows: [(&str, &[&str]); 3] = [
        ("nothing sampled", &["-i", "0"]),
        ("an allocation, its stack", &["-i", &interval, "--no-live"]),
        ("the same, and its free", &["-i", &interval]),
    ];
    let share = 1.0 - (1.0 - 1.0 / f64::from(SAMPLED_INTERVAL)).powf(options.size as f64);
    let mut taken = vec![Vec::new(); rows.len()];
    for _ in 0..options.rounds.div_ceil(8).max(3) {
        for ((_, arguments), taken) in rows.iter().zip(&mut taken) {
            let arguments = [&["--hook", "inline", "--no-follow"], *arguments].concat();
            let mut running = start(heapbpf, workload.pid(), &arguments)?;
            wait_until_still(running.id())?;
            let mut slices = Vec::new();
            for _ in 0..SAMPLED_SLICES {
                slices.push(workload.run(SAMPLED_PAIRS, options.size)?.cpu_ns as f64 / SAMPLED_PAIRS as f64);
                std::thread::sleep(BETWEEN);
            }
            stop(&mut running)?;
            taken.push(median(&slices));
        }
    }
    println!("\n{:<32} {:>9}  ns per sampled one [quartiles]", "inline hooks, sampled", "ns a pair");
    for ((name, _), each) in rows.iter().zip(&taken) {
        let more: Vec<f64> = each.iter().zip(&taken[0]).map(|(ns, nothing)| (ns - nothing) / share).collect();
        println!("{name:<32} {:>9.1}  {}", median(each), spread(&more));
    }
    Ok(())
}

fn row(
    options: &Options,
    workload: &mut Workload,
    (threads, interval): (&str, &str),
    heapbpf: &Path,
) -> anyhow::Result<()> {
    let of_all = PAIRS as f64 * threads.parse::<f64>()?;
    let pair = |workload: &mut Workload| -> anyhow::Result<f64> {
        let mut slices = Vec::new();
        for _ in 0..SLICES {
            slices.push(workload.run(PAIRS, options.size)?.cpu_ns as f64 / of_all);
        }
        Ok(median(&slices))
    };
    let (mut bare_ns, mut ns, mut ratios, mut refused) = (vec![], vec![], vec![], 0);
    for _ in 0..options.rounds.div_ceil(8).max(3) {
        let before = pair(workload)?;
        let mut running = start(heapbpf, workload.pid(), &["--hook", "inline", "--no-follow", "-i", interval])?;
        let is_hooked =
            std::fs::read_to_string(format!("/proc/{}/maps", workload.pid()))?.contains("/memfd:heapbpf-inline");
        wait_until_still(running.id())?;
        let hooked = if is_hooked { pair(workload)? } else { 0.0 };
        stop(&mut running)?;
        if !is_hooked {
            refused += 1;
            continue;
        }
        let bare = 0.5 * (before + pair(workload)?);
        bare_ns.push(bare);
        ns.push(hooked);
        ratios.push(hooked / bare);
    }
    let name = format!("-i {interval}, {threads} threads");
    if ratios.is_empty() {
        println!("{name:<32} was refused in each of {refused} rounds");
    } else {
        println!("{name:<32} {:>9.2} {:>9.2}  {}", median(&bare_ns), median(&ns), spread(&ratios));
    }
    Ok(())
}

fn wait_until_still(pid: u32) -> anyhow::Result<()> {
    let process = procfs::process::Process::new(pid.cast_signed())?;
    let ticks = || process.stat().map(|stat| stat.utime + stat.stime);
    let mut before = ticks()?;
    for _ in 0..STILL_TRIES {
        std::thread::sleep(STILL);
        let now = ticks()?;
        if now == before {
            break;
        }
        before = now;
    }
    Ok(())
}
