//! How much more CPU time programs take for their work while a recording at defaults begins and runs.

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use heapbpf_bench::quantiles::spread;
use heapbpf_bench::recording::stop;
use heapbpf_bench::sql_rows;
use heapbpf_record::cost::cpu_time;
use heapbpf_record::cost::cpus::pin;

use super::Options;

/// Time between two checks of what a program has written.
const BETWEEN: Duration = Duration::from_millis(10);
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

/// SQL that leaves the database as it was, and says so.
fn inserts() -> String {
    sql_rows(200) + "DROP TABLE items;\n.print x\n"
}

/// How long a program is watched before and after a recording, and during one after its first second.
const WATCHED: Duration = Duration::from_secs(3);

/// A running program whose turns are counted. It is killed when this is dropped.
struct Counted {
    program: Child,
    /// What it has written, bytes.
    written: Arc<AtomicU64>,
}

impl Counted {
    fn start(work: &Work) -> anyhow::Result<Self> {
        let mut command = Command::new(work.program);
        command.args(work.arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let program = command.spawn().with_context(|| format!("cannot start {}", work.program))?;
        let mut counted = Self { program, written: Arc::default() };
        let (mut input, lines) = (counted.program.stdin.take().context("piped")?, (work.input)());
        // Writes until the program stops reading.
        std::thread::spawn(move || while !lines.is_empty() && input.write_all(lines.as_bytes()).is_ok() {});
        pin(counted.program.id(), |cpu| cpu != 0);
        std::thread::sleep(WARM_UP);
        let mut output = counted.program.stdout.take().context("piped")?;
        let written = Arc::clone(&counted.written);
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(length @ 1..) = output.read(&mut bytes) {
                written.fetch_add(length as u64, Ordering::Relaxed);
            }
        });
        while counted.written.load(Ordering::Relaxed) == 0 {
            anyhow::ensure!(counted.program.try_wait()?.is_none(), "{} has ended", work.name);
            std::thread::sleep(BETWEEN);
        }
        std::thread::sleep(WARM_UP);
        Ok(counted)
    }

    /// CPU time for what the program does at each turn, during the next `time`, ns per byte that it writes.
    fn cost(&self, time: Duration) -> anyhow::Result<f64> {
        let now = || -> anyhow::Result<(f64, f64)> {
            let pid = self.program.id();
            let cpu_ns = cpu_time::of_process(pid).with_context(|| format!("process {pid} has ended"))? * 1e9;
            Ok((cpu_ns, self.written.load(Ordering::Relaxed) as f64))
        };
        let (cpu_ns, written) = now()?;
        std::thread::sleep(time);
        let (later_ns, later) = now()?;
        Ok((later_ns - cpu_ns) / (later - written))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

/// Measures and prints the CPU time of programs under `--pid` at defaults, from its start on, as a multiple of bare.
pub fn run(options: &Options, heapbpf: &Path) -> anyhow::Result<()> {
    const FIRST: Duration = Duration::from_secs(1);
    println!("\n{:<12} {:<25} later (wanted: at most 1.03)", "--pid", "first second, of bare");
    for work in WORKS.iter().filter(|work| Path::new(work.program).exists()) {
        let program = Counted::start(work)?;
        let (mut first, mut later) = (Vec::new(), Vec::new());
        for _ in 0..options.rounds.div_ceil(8) {
            let before = program.cost(WATCHED)?;
            let dir = tempfile::tempdir()?;
            let mut command = Command::new(heapbpf);
            command.args(["--quiet", "--pid", &program.program.id().to_string(), "-o"]);
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
