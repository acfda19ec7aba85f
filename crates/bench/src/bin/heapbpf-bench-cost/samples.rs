//! What samples cost a real program under inline hooks. The program repeats the same work, and sampling is paused in
//! its memory for every other slice of time. The two slices of a pair are adjacent in time, so that other work on the
//! machine, which slows programs down for seconds, affects both.

use std::fs::File;
use std::io::Write as _;
use std::mem::offset_of;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use heapbpf_attach::inline::memory;
use heapbpf_bench::sql::rows;
use heapbpf_inline::abi::{CONTROL, Control};
use heapbpf_inline::read::Counts;
use heapbpf_record::cost::cpu_time;
use heapbpf_record::cost::cpus::pin;
use heapbpf_record::cost::quantiles::{median, spread};
use heapbpf_remote::blob_range;

use super::Options;
use super::command::{start, stop};

const SLICE: Duration = Duration::from_millis(100);
/// Time between a change and its slice, in which the daemon processes the samples from before the change.
const BETWEEN: Duration = Duration::from_millis(10);
/// Pairs of slices per requested round.
const PAIRS_OF_ROUND: usize = 4;
/// At this interval, samples cost a program enough to stand out from other variation.
const OFTEN: &str = "64KiB";
const INTERVALS: [&str; 2] = ["512KiB", OFTEN];
/// Time for a program to load what it needs.
const WARM_UP: Duration = Duration::from_secs(1);

/// A program, its arguments, and the lines that it is given repeatedly.
struct Work {
    name: &'static str,
    program: &'static str,
    arguments: &'static [&'static str],
    input: fn() -> String,
}

const WORKS: [Work; 2] = [
    Work { name: "sqlite3", program: "/usr/bin/sqlite3", arguments: &["-batch", ":memory:"], input: inserts },
    Work {
        name: "python3",
        program: "/usr/bin/python3",
        arguments: &[
            "-c",
            "import json\nrow = {'k%d' % i: [i, str(i), i / 3] for i in range(200)}\nwhile True: json.loads(json.dumps(row))",
        ],
        input: String::new,
    },
];

/// SQL that leaves the database as it was.
fn inserts() -> String {
    rows(2000) + "DROP TABLE items;\n"
}

/// A running program, which is killed when this is dropped.
struct Running(Child);

impl Running {
    fn start(work: &Work) -> anyhow::Result<Self> {
        let mut command = Command::new(work.program);
        command.args(work.arguments).stdin(Stdio::piped()).stdout(Stdio::null());
        let mut child = command.spawn().with_context(|| format!("cannot start {}", work.program))?;
        let (mut input, lines) = (child.stdin.take().context("piped")?, (work.input)());
        // Writes until the program stops reading.
        std::thread::spawn(move || while !lines.is_empty() && input.write_all(lines.as_bytes()).is_ok() {});
        pin(child.id(), |cpu| cpu != 0);
        std::thread::sleep(WARM_UP);
        Ok(Self(child))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The memory of a program's inline hooks.
struct Hooks {
    pid: u32,
    memory: File,
    base: u64,
}

/// What a program has done so far, and its CPU time.
struct Moment {
    counts: Counts,
    cpu_ns: f64,
}

impl Hooks {
    fn of(pid: u32) -> anyhow::Result<Self> {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let base = maps.split_whitespace().find_map(blob_range).context("it is not hooked inline")?.start;
        Ok(Self { pid, memory: memory::open(pid)?, base })
    }

    fn pause(&self, paused: bool) -> anyhow::Result<()> {
        let at = self.base + CONTROL + offset_of!(Control, paused) as u64;
        Ok(self.memory.write_all_at(&u64::from(paused).to_le_bytes(), at)?)
    }

    fn now(&self) -> anyhow::Result<Moment> {
        let counts = memory::counts(&self.memory, self.base)?;
        let cpu_ns = cpu_time::of_process(self.pid).context("it has ended")? * 1e9;
        Ok(Moment { counts, cpu_ns })
    }

    /// Returns CPU time per allocator call, including the program's own work between calls, in nanoseconds, and the
    /// share of calls that are sampled.
    fn slice(&self, paused: bool) -> anyhow::Result<(f64, f64)> {
        self.pause(paused)?;
        std::thread::sleep(BETWEEN);
        let before = self.now()?;
        std::thread::sleep(SLICE);
        let after = self.now()?;
        let calls = (after.counts.calls - before.counts.calls) as f64;
        Ok(((after.cpu_ns - before.cpu_ns) / calls, (after.counts.sampled - before.counts.sampled) as f64 / calls))
    }
}

/// Measures and prints what samples cost programs.
pub fn run(options: &Options, heapbpf: &Path) -> anyhow::Result<()> {
    println!(
        "\n{:<40} {:>9}  {:<21}  µs per sample, with its free",
        "inline hooks", "samples/s", "of paused, CPU time"
    );
    for work in WORKS.iter().filter(|work| Path::new(work.program).exists()) {
        let line = |name: &str, interval: &str, heapbpf: &Path| -> anyhow::Result<()> {
            let what = format!("{}, {name}-i {interval}", work.name);
            println!("{what:<40} {}", row(options.rounds * PAIRS_OF_ROUND, work, interval, heapbpf)?);
            Ok(())
        };
        INTERVALS.iter().try_for_each(|interval| line("", interval, heapbpf))?;
        for also in &options.also {
            let name = also.file_name().unwrap_or_default().to_string_lossy();
            line(&format!("{name}, "), OFTEN, also)?;
        }
    }
    Ok(())
}

fn row(pairs: usize, work: &Work, interval: &str, heapbpf: &Path) -> anyhow::Result<String> {
    let program = Running::start(work)?;
    let mut recording = start(heapbpf, program.0.id(), &["--hook", "inline", "--no-follow", "-i", interval])?;
    let (mut ratios, mut each_us, mut rates) = (Vec::new(), Vec::new(), Vec::new());
    let mut measure = || -> anyhow::Result<()> {
        let hooks = Hooks::of(program.0.id())?;
        std::thread::sleep(WARM_UP);
        for pair in 0..pairs {
            // Each of the two comes first equally often.
            let first = hooks.slice(pair % 2 == 0)?;
            let second = hooks.slice(pair % 2 != 0)?;
            let ((paused_ns, _), (sampled_ns, share)) = if pair % 2 == 0 { (first, second) } else { (second, first) };
            ratios.push(sampled_ns / paused_ns);
            each_us.push((sampled_ns - paused_ns) / share / 1e3);
            rates.push(share / sampled_ns * 1e9);
        }
        hooks.pause(false)
    };
    let measured = measure();
    stop(&mut recording)?;
    measured?;
    Ok(format!("{:>9.0}  {:<23}  {}", median(&rates), spread(&ratios), spread(&each_us)))
}
