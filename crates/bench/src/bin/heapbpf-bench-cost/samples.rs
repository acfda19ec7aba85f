//! What samples cost a real program under inline hooks. The program repeats the same work, and sampling is paused in
//! its memory for every other slice of time. The two slices of a pair are adjacent in time, so that other work on the
//! machine, which slows programs down for seconds, affects both.
//!
//! Also what a whole recording at defaults takes of programs that are at work when it begins.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::mem::offset_of;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use heapbpf_attach::inline::memory;
use heapbpf_bench::recording::stop;
use heapbpf_bench::sql::rows;
use heapbpf_inline::abi::{CONTROL, Control};
use heapbpf_inline::read::Counts;
use heapbpf_record::cost::cpu_time;
use heapbpf_record::cost::cpus::pin;
use heapbpf_record::cost::quantiles::{median, spread};
use heapbpf_remote::blob_range;

use super::Options;
use super::command::start;

const SLICE: Duration = Duration::from_millis(100);
/// Time between a change and its slice, in which the daemon processes the samples from before the change.
const BETWEEN: Duration = Duration::from_millis(10);
/// Pairs of slices per requested round.
const PAIRS_OF_ROUND: usize = 4;
/// At the second, samples cost a program enough to stand out from other variation.
const INTERVALS: [&str; 2] = ["512KiB", "64KiB"];
/// Time for a program to load what it needs.
const WARM_UP: Duration = Duration::from_secs(1);

/// A program, its arguments, and the lines that it is given repeatedly.
struct Work {
    name: &'static str,
    program: &'static str,
    arguments: &'static [&'static str],
    input: fn() -> String,
}

/// Programs that write something at each turn of their work.
const WORKS: [Work; 4] = [
    Work { name: "sqlite3", program: "/usr/bin/sqlite3", arguments: &["-batch", ":memory:"], input: inserts },
    Work {
        name: "python3",
        program: "/usr/bin/python3",
        arguments: &[
            "-c",
            "import json\nrow = {'k%d' % i: [i, str(i), i / 3] for i in range(200)}\nwhile True:\n    \
             json.loads(json.dumps(row))\n    print('x', flush=True)",
        ],
        input: String::new,
    },
    Work {
        name: "ruby",
        program: "/usr/bin/ruby",
        arguments: &[
            "-e",
            "$stdout.sync = true\nrow = (0...200).to_h { |i| [\"k#{i}\", [i, i.to_s, i / 3.0]] }\n\
             loop { row.map { |k, v| k + v.join(',') }.join(';').split(';'); print 'x' }",
        ],
        input: String::new,
    },
    Work {
        name: "octave",
        program: "/usr/bin/octave-cli",
        arguments: &[
            "--quiet",
            "--no-init-file",
            "--eval",
            "while true, x = cell(1, 200); for k = 1:200, x{k} = sprintf('%d', k); end; s = strjoin(x, ','); \
             puts('x'); fflush(stdout); end",
        ],
        input: String::new,
    },
];
/// Of these, the first ones, whose calls inline hooks count.
const SAMPLED: usize = 2;

/// SQL that leaves the database as it was, and says so.
fn inserts() -> String {
    rows(200) + "DROP TABLE items;\n.print x\n"
}

/// A running program, which is killed when this is dropped.
struct Running(Child);

impl Running {
    fn start(work: &Work, output: Stdio) -> anyhow::Result<Self> {
        let mut command = Command::new(work.program);
        command.args(work.arguments).stdin(Stdio::piped()).stdout(output);
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
    for work in WORKS[..SAMPLED].iter().filter(|work| Path::new(work.program).exists()) {
        for interval in INTERVALS {
            let what = format!("{}, -i {interval}", work.name);
            println!("{what:<40} {}", row(options.rounds * PAIRS_OF_ROUND, work, interval, heapbpf)?);
        }
    }
    Ok(())
}

fn row(pairs: usize, work: &Work, interval: &str, heapbpf: &Path) -> anyhow::Result<String> {
    let program = Running::start(work, Stdio::null())?;
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

/// How long a program is watched before and after a recording, and during one after its first second.
const WATCHED: Duration = Duration::from_secs(3);

/// A program whose turns are counted.
struct Counted {
    program: Running,
    /// What it has written, bytes.
    written: Arc<AtomicU64>,
}

impl Counted {
    fn start(work: &Work) -> anyhow::Result<Self> {
        let mut program = Running::start(work, Stdio::piped())?;
        let mut output = program.0.stdout.take().context("piped")?;
        let written = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&written);
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(length @ 1..) = output.read(&mut bytes) {
                counted.fetch_add(length as u64, Ordering::Relaxed);
            }
        });
        while written.load(Ordering::Relaxed) == 0 {
            anyhow::ensure!(program.0.try_wait()?.is_none(), "{} has ended", work.name);
            std::thread::sleep(BETWEEN);
        }
        std::thread::sleep(WARM_UP);
        Ok(Self { program, written })
    }

    /// CPU time for what the program does at each turn, during the next `time`, ns per byte that it writes.
    fn cost(&self, time: Duration) -> anyhow::Result<f64> {
        let now = || -> anyhow::Result<(f64, f64)> {
            let cpu_ns = cpu_time::of_process(self.program.0.id()).context("it has ended")? * 1e9;
            Ok((cpu_ns, self.written.load(Ordering::Relaxed) as f64))
        };
        let (cpu_ns, written) = now()?;
        std::thread::sleep(time);
        let (later_ns, later) = now()?;
        Ok((later_ns - cpu_ns) / (later - written))
    }
}

/// Measures and prints what `--pid` at defaults takes of programs, from its start on.
pub fn arrival(options: &Options, heapbpf: &Path) -> anyhow::Result<()> {
    const FIRST: Duration = Duration::from_secs(1);
    println!("\n{:<12} {:<25} later (wanted: at most 1.03)", "--pid", "first second, of bare");
    for work in WORKS.iter().filter(|work| Path::new(work.program).exists()) {
        let program = Counted::start(work)?;
        let (mut first, mut later) = (Vec::new(), Vec::new());
        for _ in 0..options.rounds.div_ceil(8) {
            let before = program.cost(WATCHED)?;
            let dir = tempfile::tempdir()?;
            let mut command = Command::new(heapbpf);
            command.args(["--quiet", "--pid", &program.program.0.id().to_string(), "-o"]);
            let mut recording = command.arg(dir.path().join("profile.json")).stderr(Stdio::null()).spawn()?;
            let recorded = [program.cost(FIRST)?, program.cost(WATCHED)?];
            stop(&mut recording)?;
            std::thread::sleep(WARM_UP);
            let bare = 0.5 * (before + program.cost(WATCHED)?);
            first.push(recorded[0] / bare);
            later.push(recorded[1] / bare);
        }
        println!("{:<12} {:<25} {}", work.name, spread(&first), spread(&later));
    }
    Ok(())
}
