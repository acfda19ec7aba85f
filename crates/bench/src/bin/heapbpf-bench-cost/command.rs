//! The cost of the `heapbpf` command with its daemon, against the no-op baseline.

use std::path::Path;
use std::process::Child;
use std::time::Duration;

use heapbpf_bench::quantiles::{median, spread};
use heapbpf_bench::recording::{self, stop};
use heapbpf_kernel::guardian::Guardian;
use heapbpf_record::cost::trial::{Allocator, Baseline};
use heapbpf_record::cost::workload::Workload;

use super::pairs::{Where, attach};
use super::pinned::Library;
use super::{Options, SIZE};

const PAIRS: u64 = 300_000;

/// Measures and prints a malloc/free pair under the command with `--hook probe`, for several options.
pub fn run(options: &Options, object: &[u8], library: &Library, heapbpf: &Path) -> anyhow::Result<()> {
    let mut workload = library.start(&options.pairs, &["1"])?;
    let allocator = Allocator::of_process(workload.pid())?;
    let mut baseline = Baseline::load(object, &Guardian::default())?;
    let pid = workload.pid();
    let mut rows: Vec<(&[&str], Vec<f64>, Vec<f64>)> = vec![
        (&["-i", "512KiB"], vec![], vec![]),
        (&["-i", "512KiB", "--no-live"], vec![], vec![]),
        (&["-i", "0"], vec![], vec![]),
        (&["-i", "4KiB"], vec![], vec![]),
        (&["-i", "1"], vec![], vec![]),
    ];
    for _ in 0..options.rounds.div_ceil(8) {
        for (arguments, ns, to_baseline) in &mut rows {
            let mut at_baseline = |workload: &mut Workload| -> anyhow::Result<f64> {
                attach(&mut baseline, &allocator, pid, Where::Everywhere, false)?;
                let spent = workload.run(PAIRS / 2, SIZE)?;
                baseline.off();
                Ok(spent.cpu_ns as f64 / (PAIRS / 2) as f64)
            };
            let before = at_baseline(&mut workload)?;
            let arguments = [&["--hook", "probe"][..], *arguments].concat();
            let mut running = start(heapbpf, pid, &arguments)?;
            let spent = workload.run(PAIRS, SIZE)?;
            stop(&mut running)?;
            let after = at_baseline(&mut workload)?;
            ns.push(spent.cpu_ns as f64 / PAIRS as f64);
            to_baseline.push(spent.cpu_ns as f64 / PAIRS as f64 / (0.5 * (before + after)));
        }
    }
    println!("\n{:<32} {:>9}            of the baseline [quartiles]", "--hook probe, per pair", "ns");
    for (arguments, ns, to_baseline) in &rows {
        println!("{:<32} {:>9.1}            {}", arguments.join(" "), median(ns), spread(to_baseline));
    }
    Ok(())
}

/// Pairs in the daemon's measurement: they take some seconds.
const DAEMON_PAIRS: u64 = 4_000_000;
/// Bytes per allocation in that measurement: the mean of a realistic mix.
const DAEMON_SIZE: u64 = 1024;
/// Time that the idle daemon is observed.
const QUIET: Duration = Duration::from_secs(5);

/// Measures and prints the CPU time, memory and wake-ups of the daemon, busy and idle, for each way to count calls.
pub fn daemon(options: &Options, library: &Library, heapbpf: &Path) -> anyhow::Result<()> {
    // Inline hooks slow the loop down much less.
    daemon_of(options, library, heapbpf, ("inline", 20 * DAEMON_PAIRS))?;
    daemon_of(options, library, heapbpf, ("probe", DAEMON_PAIRS))
}

fn daemon_of(options: &Options, library: &Library, heapbpf: &Path, (hook, pairs): (&str, u64)) -> anyhow::Result<()> {
    let mut workload = library.start(&options.pairs, &["1"])?;
    let mut running = start(heapbpf, workload.pid(), &["--hook", hook, "-i", "512KiB"])?;
    // The first samples make the daemon load the tables of the files.
    workload.run(pairs / 8, DAEMON_SIZE)?;
    let before = Process::read(running.id())?;
    std::thread::sleep(QUIET);
    let quiet = Process::read(running.id())?;
    let spent = workload.run(pairs, DAEMON_SIZE)?;
    let busy = Process::read(running.id())?;
    stop(&mut running)?;
    let seconds = spent.wall_ns as f64 * 1e-9;
    let rate = pairs as f64 / seconds;
    println!(
        "\nthe daemon, --hook {hook}, at {:.0} allocations of {DAEMON_SIZE} bytes a second, 512 KiB: {:.2} % of a core ({:.2} % per million a \
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

/// Resources that a process has used so far.
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

/// Starts a recording of a process and waits until it has begun.
pub fn start(heapbpf: &Path, pid: u32, arguments: &[&str]) -> anyhow::Result<Child> {
    let (dir, pid) = (tempfile::tempdir()?.keep(), pid.to_string());
    recording::start(heapbpf, &dir, &[&["--pid", &pid][..], arguments].concat())
}
