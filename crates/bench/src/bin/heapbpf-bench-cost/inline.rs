//! The cost of a malloc/free pair under inline hooks, compared with the same pair without hooks.

use std::path::Path;
use std::time::Duration;

use heapbpf_bench::quantiles::{median, quantile, spread};
use heapbpf_bench::recording::{is_hooked, stop};
use heapbpf_record::cost::workload::Workload;

use super::command::start;
use super::pinned::Library;
use super::{Options, SIZE};

/// Pairs in a slice, over all threads: some tens of milliseconds.
const PAIRS: u64 = 4_000_000;
/// The same for loops whose bare pair takes some 100 ns.
const SLOW_PAIRS: u64 = 400_000;
/// Slices of one measurement.
const SLICES: usize = 40;
/// The quantile of a measurement's slices that counts. Other work on the core, such as a virtual machine's neighbour,
/// doubles the time of a pair for seconds, hooked or not. It never makes one faster.
const UNDISTURBED: f64 = 0.25;
/// A daemon that used no CPU time for this long has finished starting. Until then it uses execution units that its CPU
/// shares with a sibling, and a pair on that one takes up to twice as long.
const STILL: Duration = Duration::from_millis(300);
/// Maximum number of such periods to wait.
const STILL_TRIES: usize = 30;
/// What is measured: allocator, threads and interval.
const ROWS: [(&str, &str, &str); 11] = [
    (GLIBC, "1", "0"),
    (GLIBC, "1", "512KiB"),
    (GLIBC, "1", "64KiB"),
    (GLIBC, "4", "0"),
    (GLIBC, "4", "512KiB"),
    (GLIBC, "16", "512KiB"),
    ("jemalloc", "1", "512KiB"),
    ("tcmalloc", "1", "512KiB"),
    (MUSL, "1", "512KiB"),
    (PYTHON, "1", "0"),
    (PYTHON, "1", "512KiB"),
];
const GLIBC: &str = "glibc";
/// Linked statically.
const MUSL: &str = "musl";
/// Objects of `/usr/bin/python3`, in a loop written in Python.
const PYTHON: &str = "Python objects";

/// Measures and prints a pair with `--hook inline`, for several allocators, numbers of threads and intervals.
pub fn run(options: &Options, library: &Library, heapbpf: &Path) -> anyhow::Result<()> {
    println!(
        "\n{:<32} {:>8} {:>8}  {:<21}  {:<21}",
        "inline hooks, per pair", "bare ns", "ns", "of bare", "once let go"
    );
    for what in ROWS {
        row(options, library, what, heapbpf)?;
    }
    sampled(options, library, heapbpf)
}

/// Starts the loop with this allocator. Returns `None` if there is no program for it.
fn start_loop(
    options: &Options,
    library: &Library,
    allocator: &str,
    threads: &str,
) -> anyhow::Result<Option<Workload>> {
    let preloaded = match allocator {
        GLIBC => None,
        MUSL => {
            let Some(program) = &options.musl_pairs else { return Ok(None) };
            return library.start(program, &[threads]).map(Some);
        }
        PYTHON => {
            let Some(program) = options.python_pairs.as_deref().and_then(Path::to_str) else { return Ok(None) };
            return library.start(Path::new("/usr/bin/python3"), &[program]).map(Some);
        }
        "jemalloc" => Some("libjemalloc.so.2"),
        _ => Some("libtcmalloc.so.4"),
    };
    library.start_with(&options.pairs, &[threads], preloaded).map(Some)
}

/// An interval with enough samples to measure their cost, and few enough for the daemon to keep up.
const SAMPLED_INTERVAL: u32 = 4096;
/// Pairs in a slice. Their samples fit in the ring.
const SAMPLED_PAIRS: u64 = 40_000;
const SAMPLED_SLICES: usize = 15;
/// Time for the daemon to empty the ring.
const BETWEEN: Duration = Duration::from_millis(30);

/// Measures and prints the cost of a sampled allocation with its stack: the extra time per pair compared with no
/// sampling, divided by the share of pairs that are sampled.
fn sampled(options: &Options, library: &Library, heapbpf: &Path) -> anyhow::Result<()> {
    let mut workload = library.start(&options.pairs, &["1"])?;
    let interval = SAMPLED_INTERVAL.to_string();
    let rows: [(&str, &[&str]); 3] = [
        ("nothing sampled", &["-i", "0"]),
        ("an allocation, its stack", &["-i", &interval, "--no-live"]),
        ("the same, and its free", &["-i", &interval]),
    ];
    let share = 1.0 - (1.0 - 1.0 / f64::from(SAMPLED_INTERVAL)).powf(SIZE as f64);
    let mut taken = vec![Vec::new(); rows.len()];
    for _ in 0..options.rounds.div_ceil(8).max(3) {
        for ((_, arguments), taken) in rows.iter().zip(&mut taken) {
            let arguments = [&["--hook", "inline", "--no-follow"], *arguments].concat();
            let mut running = start(heapbpf, workload.pid(), &arguments)?;
            wait_until_still(running.id())?;
            let mut slices = Vec::new();
            for _ in 0..SAMPLED_SLICES {
                slices.push(workload.run(SAMPLED_PAIRS, SIZE)?.cpu_ns as f64 / SAMPLED_PAIRS as f64);
                std::thread::sleep(BETWEEN);
            }
            stop(&mut running)?;
            taken.push(quantile(&slices, UNDISTURBED));
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
    library: &Library,
    (allocator, threads, interval): (&str, &str, &str),
    heapbpf: &Path,
) -> anyhow::Result<()> {
    let name = format!("{allocator}, -i {interval}, {threads} threads");
    let Some(mut workload) = start_loop(options, library, allocator, threads)? else {
        println!("{name:<32} was not measured: there is no such program");
        return Ok(());
    };
    let pairs = if matches!(allocator, MUSL | PYTHON) { SLOW_PAIRS } else { PAIRS };
    let of_each = pairs / threads.parse::<u64>()?;
    let slices = |workload: &mut Workload| -> anyhow::Result<Vec<f64>> {
        let slice = || Ok(workload.run(of_each, SIZE)?.cpu_ns as f64 / pairs as f64);
        std::iter::repeat_with(slice).take(SLICES).collect()
    };
    let undisturbed = |slices: &[f64]| quantile(slices, UNDISTURBED);
    let (mut bare_ns, mut ns, mut ratios, mut left, mut refused) = (vec![], vec![], vec![], vec![], 0);
    for _ in 0..options.rounds.div_ceil(8).max(3) {
        let before = slices(&mut workload)?;
        let mut running = start(heapbpf, workload.pid(), &["--hook", "inline", "--no-follow", "-i", interval])?;
        let is_hooked = is_hooked(workload.pid());
        wait_until_still(running.id())?;
        let hooked = if is_hooked { undisturbed(&slices(&mut workload)?) } else { 0.0 };
        stop(&mut running)?;
        if !is_hooked {
            refused += 1;
            continue;
        }
        let after = slices(&mut workload)?;
        let bare = undisturbed(&[before.as_slice(), &after].concat());
        bare_ns.push(bare);
        ns.push(hooked);
        ratios.push(hooked / bare);
        left.push(undisturbed(&after) / undisturbed(&before));
    }
    if ratios.is_empty() {
        println!("{name:<32} was refused in each of {refused} rounds");
    } else {
        let (bare, ns) = (median(&bare_ns), median(&ns));
        println!("{name:<32} {bare:>8.2} {ns:>8.2}  {:<21}  {:<21}", spread(&ratios), spread(&left));
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
