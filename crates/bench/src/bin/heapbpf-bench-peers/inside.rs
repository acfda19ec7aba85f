//! Real programs under inline hooks, compared with profilers that run inside the process or trace it: CPU time as a
//! ratio of bare.
//!
//! Each program starts in the same way under all of them. It waits for its input, the profiler attaches, and from then
//! on its CPU time is read from its own clock. The work of heapbpf and of other profilers' processes is not included.

use std::fs;
use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use heapbpf_bench::recording::is_hooked;
use heapbpf_bench::sql_rows;
use heapbpf_record::cost::cpu_time;
use heapbpf_record::cost::cpus::pin;

use super::Options;
use super::peers::{How, PEERS, Peer, Place};
use super::process;
use super::run::{Bench, Tool};
use super::table::{figures, median};
use super::target::{PATIENCE, awaited};
use super::workloads::{GLIBC, JEMALLOC, REDIS, compiler, functions, made, redis, requests, socket};

/// A program and how much it does.
struct Work {
    name: &'static str,
    unit: &'static str,
    operations: u64,
    /// The same for a profiler that slows the program down a hundredfold.
    few: u64,
    allocator: &'static str,
    needs: &'static str,
}

const SQLITE: &str = "/usr/bin/sqlite3";
const PYTHON: &str = "/usr/bin/python3";
const COMPILER: &str = "/usr/bin/gcc";
/// The Rust compiler, wherever its toolchain is. jemalloc is linked into it, so a preloaded allocator gets none of its
/// calls.
const RUSTC: &str = "rustc";

/// Some tenths of a second each: short enough that some runs are not disturbed by the rest of the machine.
const WORKS: [Work; 5] = [
    Work { name: "sqlite3", unit: "row", operations: 40_000, few: 3_000, allocator: GLIBC, needs: SQLITE },
    Work { name: "redis", unit: "request", operations: 150_000, few: 12_000, allocator: JEMALLOC, needs: REDIS },
    Work { name: "python3", unit: "dumps and loads", operations: 3_000, few: 1_000, allocator: GLIBC, needs: PYTHON },
    Work { name: "cc1", unit: "function", operations: 100, few: 30, allocator: GLIBC, needs: COMPILER },
    Work { name: RUSTC, unit: "function", operations: 10, few: 2, allocator: RUSTC, needs: "" },
];

/// The profiler of a run.
enum Who {
    Nobody,
    /// `heapbpf -- COMMAND`, with these options.
    Starting(&'static [&'static str]),
    /// heapbpf attaches while the program waits, with these options.
    Coming(&'static [&'static str]),
    /// A profiler from the table of all profilers.
    Peer(&'static str),
    /// heaptrack attaches while the program waits.
    Injected,
}

const HEAPTRACK: &str = "/usr/bin/heaptrack";

/// Measured for Python only.
const WITHOUT_OBJECTS: &str = "the same, 512 KiB, --python-objects=no";

/// The profilers, with their names in the table.
const CONDITIONS: [(&str, Who); 13] = [
    ("bare", Who::Nobody),
    ("heapbpf -- COMMAND, 512 KiB", Who::Starting(&["-i", "512KiB"])),
    ("heapbpf -- COMMAND, 64 KiB", Who::Starting(&["-i", "64KiB"])),
    ("heapbpf --hook inline --pid, 512 KiB", Who::Coming(&["-i", "512KiB"])),
    ("heapbpf --hook inline --pid, 64 KiB", Who::Coming(&["-i", "64KiB"])),
    (WITHOUT_OBJECTS, Who::Coming(&["-i", "512KiB", "--python-objects=no"])),
    ("heaptrack", Who::Peer("heaptrack")),
    ("heaptrack -p", Who::Injected),
    ("bcc memleak", Who::Peer("bcc memleak")),
    ("jemalloc, no profiler", Who::Peer("jemalloc, no profiler")),
    ("its profiler, 512 KiB, of that", Who::Peer("jemalloc's profiler, 512 KiB")),
    ("tcmalloc, no profiler", Who::Peer("tcmalloc, no profiler")),
    ("its sampler, 512 KiB, of that", Who::Peer("tcmalloc's sampler, 512 KiB")),
];

/// Maximum time to wait for a program to end after it was asked to.
const PATIENCE_AT_END: Duration = Duration::from_secs(2);
/// A program that uses no CPU time for this long is waiting.
const STILL: Duration = Duration::from_millis(150);
/// Interval between reads of a program's clock. Time used after the last read is missing.
const LOOK: Duration = Duration::from_micros(300);

/// Measures and prints, and writes the table.
pub fn run(bench: &mut Bench, options: &Options) -> anyhow::Result<()> {
    let works: Vec<&Work> = WORKS.iter().filter(|work| super::is_wanted(work.name, &options.workloads)).collect();
    let wanted = |(name, who): &&(&str, Who)| matches!(who, Who::Nobody) || super::is_wanted(name, &options.only);
    let conditions: Vec<&(&str, Who)> = CONDITIONS.iter().filter(wanted).collect();
    let mut taken = vec![vec![Vec::new(); works.len()]; conditions.len()];
    // Bare times, with many operations and with few.
    let mut bare = vec![[Vec::new(), Vec::new()]; works.len()];
    let mut failures = Vec::new();
    for round in 0..options.rounds {
        for (column, work) in works.iter().enumerate() {
            let needed = if work.name == RUSTC && rust_compiler().is_err() { RUSTC } else { work.needs };
            if let Some(file) = super::missing(work.name, &[needed], round) {
                failures.push(format!("{}: there is no {file}", work.name));
                continue;
            }
            for few in [false, true, false] {
                bare[column][usize::from(few)].push(measure(bench, work, &Who::Nobody, few)?);
            }
            for (row, (name, who)) in conditions.iter().enumerate() {
                let is_for_python = *name == WITHOUT_OBJECTS;
                if is_for_python && work.name != "python3" || work.name == RUSTC && is_preloaded(who) {
                    continue;
                }
                match measure(bench, work, who, is_slow(who)) {
                    Ok(ns) => taken[row][column].push(ns),
                    Err(error) => {
                        eprintln!("{name} on {}: {error:#}", work.name);
                        failures.push(format!("{name} on {}: {error:#}", work.name));
                    }
                }
            }
            eprintln!("round {} of {}: {} done", round + 1, options.rounds, work.name);
        }
    }
    let head: Vec<String> =
        works.iter().zip(&bare).map(|(work, [many, _])| heading(work, least(many).unwrap_or(0.0))).collect();
    let mut text = format!(
        "{} {LEAST}\n\n| | {} |\n|{}\n",
        super::machine(options.rounds).replace("medians of", "least and median of"),
        head.join(" | "),
        "---|".repeat(head.len() + 1)
    );
    for ((name, who), row) in conditions.iter().zip(&taken) {
        let few = usize::from(is_slow(who));
        let same_allocator = conditions.iter().position(|(_, other)| is_without_profiler(other, who));
        let against = |column: usize| same_allocator.map_or(&bare[column][few], |row| &taken[row][column]);
        let cells: Vec<String> = row.iter().enumerate().map(|(column, ns)| cell(ns.clone(), against(column))).collect();
        text += &format!("| {name} | {} |\n", cells.join(" | "));
    }
    failures.sort_unstable();
    failures.dedup();
    for failure in failures {
        let failure: String = failure.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(200).collect();
        text += &format!("\nFailed: {}\n", failure.replace('|', "/"));
    }
    println!("{text}");
    super::write(options, "inline-peers", &text)
}

fn heading(work: &Work, ns: f64) -> String {
    format!("{} ({} ns per {})", work.name, figures(ns), work.unit)
}

/// How the table's figures are chosen, and why.
const LEAST: &str = "Figures are the least time of all rounds, as a ratio of the least bare time, and the same of the medians in \
                     brackets: what else runs on the machine makes programs slower for seconds, by up to twice, and never faster.";

fn least(values: &[f64]) -> Option<f64> {
    values.iter().copied().reduce(f64::min)
}

/// The least time as a ratio of the least bare one, and the ratio of the medians.
fn cell(ns: Vec<f64>, bare: &[f64]) -> String {
    let ratio = |of: Option<f64>, to: Option<f64>| Some(of? / to?);
    let (smallest, middle) = (ratio(least(&ns), least(bare)), ratio(median(ns), median(bare.to_vec())));
    match (smallest, middle) {
        (Some(smallest), Some(middle)) if middle < 10.0 => format!("{smallest:.3} ({middle:.3})"),
        (Some(smallest), _) => figures(smallest),
        _ => "–".into(),
    }
}

/// Whether the profiler is a preloaded library.
fn is_preloaded(who: &Who) -> bool {
    matches!(who, Who::Peer(name) if peer(name).is_ok_and(|peer| matches!(peer.how, How::Preload(_))))
}

/// Whether `other` is the allocator of `sampler` without its profiler.
fn is_without_profiler(other: &Who, sampler: &Who) -> bool {
    let (Who::Peer(other), Who::Peer(sampler)) = (other, sampler) else { return false };
    peer(sampler).is_ok_and(|sampler| sampler.against == *other)
}

fn is_slow(who: &Who) -> bool {
    matches!(who, Who::Peer(name) if *name == "bcc memleak")
}

/// A program that waits for its input, and the process that started it.
struct Started {
    /// The program, or the heapbpf that started it.
    child: Child,
    pid: u32,
    input: Option<ChildStdin>,
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            // If heapbpf is killed, its program ends at the end of its input, unless it is a server.
            // SAFETY: sends a signal to our child, or to the child of a heapbpf, which has not ended as long as the
            // heapbpf runs.
            unsafe { libc::kill(self.pid.cast_signed(), libc::SIGTERM) };
            // A server removes its socket when it ends. It must not remove the next one's.
            let begun = Instant::now();
            while !process::is_dead(self.pid) && begun.elapsed() < PATIENCE_AT_END {
                std::thread::sleep(Duration::from_millis(10));
            }
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Returns the program's CPU time from when it gets its input, nanoseconds per operation.
fn measure(bench: &mut Bench, work: &Work, who: &Who, few: bool) -> anyhow::Result<f64> {
    let operations = if few { work.few } else { work.operations };
    let out = bench.results.path().join(format!("inside-{}", work.name));
    let (words, input) = prepared(bench, work, operations)?;
    let mut started = start(bench, work, who, &words, &out)?;
    let tool = attach(bench, work, who, started.pid, &out)?;
    await_stillness(started.pid)?;
    let before = clock(started.pid).context("it has ended")?;
    let asked = if work.name == "redis" {
        let asked = requests(operations, &bench.files.inputs)?.output().context("cannot ask the server")?;
        let said = String::from_utf8_lossy(&asked.stderr);
        anyhow::ensure!(asked.status.success(), "the server was not asked all ({}): {said}", asked.status);
        true
    } else {
        let mut pipe = started.input.take().context("piped")?;
        std::thread::spawn(move || pipe.write_all(&input));
        false
    };
    let mut last = clock(started.pid).unwrap_or(before);
    while !asked && !is_over(&mut started)? {
        last = clock(started.pid).unwrap_or(last).max(last);
        std::thread::sleep(LOOK);
    }
    // What heaptrack injected ends with the program, and heaptrack ends with that.
    drop(started);
    drop(tool.map(Tool::stop));
    for file in fs::read_dir(bench.results.path())?.flatten() {
        let _ = fs::remove_file(file.path());
    }
    Ok((last - before) as f64 / operations as f64)
}

/// Whether the program has ended.
fn is_over(started: &mut Started) -> anyhow::Result<bool> {
    let is_dead = process::is_dead(started.pid);
    if let Some(status) = started.child.try_wait()? {
        anyhow::ensure!(status.success(), "the program failed: {status}");
        return Ok(true);
    }
    // A zombie's clock can still be read. What heapbpf then does with the profile takes none of its time.
    Ok(is_dead && started.child.id() != started.pid)
}

/// The command line of a program, and its input.
fn prepared(bench: &Bench, work: &Work, operations: u64) -> anyhow::Result<(Vec<String>, Vec<u8>)> {
    let inputs = &bench.files.inputs;
    let text = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    Ok(match work.name {
        "sqlite3" => {
            let script = made(&inputs.join(format!("fill-{operations}.sql")), || sql_rows(operations))?;
            (text(&[SQLITE, "-batch", ":memory:"]), format!(".read {}\n", script.display()).into_bytes())
        }
        "python3" => {
            let script = bench.files.sources.join("json_loop.py").display().to_string();
            (text(&[PYTHON, &script, &operations.to_string()]), b"go\n".to_vec())
        }
        "redis" => (redis(inputs), Vec::new()),
        RUSTC => {
            let object = inputs.join("functions.o").display().to_string();
            let options = ["--crate-name", "functions", "--crate-type", "lib", "--edition", "2021"];
            let optimized = ["-C", "opt-level=1", "-C", "codegen-units=1", "--emit", "obj", "-o", &object, "-"];
            (
                text(&[&[&*rust_compiler()?], &options[..], &optimized[..]].concat()),
                rust_functions(operations).into_bytes(),
            )
        }
        _ => (text(&[&compiler()?, "-quiet", "-O1", "-", "-o", "/dev/null"]), functions(operations).into_bytes()),
    })
}

/// Returns the path of the compiler itself. rustup's `rustc` on the path only starts it.
fn rust_compiler() -> anyhow::Result<String> {
    let found = Command::new(RUSTC).args(["--print", "sysroot"]).output().context("no rustc")?;
    anyhow::ensure!(found.status.success(), "rustc does not say where it is");
    Ok(format!("{}/bin/rustc", String::from_utf8(found.stdout)?.trim()))
}

/// Rust source with generic containers, loops and matches, to keep a compiler busy.
fn rust_functions(count: u64) -> String {
    let function = |i: u64| {
        let (length, factor) = (i % 9 + 1, i % 13 + 1);
        format!(
            "#[derive(Clone, Debug, PartialEq)]\npub struct Node{i} {{ pub values: [i64; {length}], pub name: String }}\n\
             pub fn walk{i}(nodes: &mut Vec<Node{i}>, limit: i64) -> Option<i64> {{\n    nodes.retain(|node| \
             node.values.iter().any(|value| *value > limit));\n    nodes.sort_by_key(|node| node.name.len());\n    let sum: \
             i64 = nodes.iter().flat_map(|node| node.values.iter().map(|value| value * {factor})).sum();\n    match sum & 7 \
             {{ 0 => None, 3 => Some(sum * 5), 5 => nodes.first().map(|node| node.values[0]), _ => Some(sum + limit) }}\n}}\n"
        )
    };
    (0..count).map(function).collect()
}

/// Starts a program, and waits until it waits for input.
fn start(bench: &Bench, work: &Work, who: &Who, words: &[String], out: &Path) -> anyhow::Result<Started> {
    let mut command = match who {
        Who::Starting(options) => {
            let mut command = Command::new(&bench.heapbpf);
            command.args(["--quiet", "--force", "-o"]).arg(out.with_extension("json")).args(*options);
            command.arg("--").args(words);
            command
        }
        _ => {
            let mut command = Command::new(&words[0]);
            command.args(&words[1..]);
            command
        }
    };
    if let Who::Peer(name) = who
        && let How::Preload(variables) = peer(name)?.how
    {
        command.envs(variables(&place(bench, 0, Path::new(""), out)));
    }
    let _ = fs::remove_file(socket(&bench.files.inputs));
    let output = fs::File::create(out.with_extension("said"))?;
    command.current_dir(&bench.files.inputs).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(output);
    let mut child = command.spawn().with_context(|| format!("cannot start {}", words[0]))?;
    let input = child.stdin.take();
    let mut started = Started { pid: child.id(), child, input };
    if matches!(who, Who::Starting(_)) {
        started.pid = awaited("the command", &mut started.child, |heapbpf| program_of(heapbpf, &words[0]))?;
        let pid = started.pid;
        awaited("inline hooks", &mut started.child, |_| is_hooked(pid).then_some(()))?;
    }
    pin(started.pid, |cpu| cpu != 0);
    if work.name == "redis" {
        let inputs = bench.files.inputs.clone();
        awaited("the server", &mut started.child, |_| UnixStream::connect(socket(&inputs)).ok())?;
    }
    await_stillness(started.pid)?;
    Ok(started)
}

/// Returns the process that runs `program` under a heapbpf.
fn program_of(heapbpf: u32, program: &str) -> Option<u32> {
    let wanted = fs::canonicalize(program).ok()?;
    let runs = |pid: &u32| fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == wanted);
    process::children(heapbpf).into_iter().find(runs)
}

/// Starts the profiler, if it attaches to a running process.
fn attach(bench: &Bench, work: &Work, who: &Who, pid: u32, out: &Path) -> anyhow::Result<Option<Tool>> {
    let library = process::library(pid, work.allocator).unwrap_or_default();
    let is_injected =
        || fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| maps.contains("libheaptrack_inject"));
    let here: &dyn Fn() -> bool = match who {
        Who::Coming(_) => &|| is_hooked(pid),
        Who::Injected => &is_injected,
        _ => &|| true,
    };
    let words = match who {
        Who::Nobody | Who::Starting(_) => return Ok(None),
        Who::Coming(options) => {
            let heapbpf = bench.heapbpf.display().to_string();
            let own = ["--hook", "inline", "--no-follow", "--quiet", "--force", "--pid"];
            let mut words: Vec<String> = own.map(str::to_owned).into();
            words.insert(0, heapbpf);
            words.extend([pid.to_string(), "-o".into(), out.with_extension("json").display().to_string()]);
            words.extend(options.iter().map(|word| (*word).to_owned()));
            words
        }
        Who::Injected => {
            anyhow::ensure!(Path::new(HEAPTRACK).exists(), "there is no {HEAPTRACK}");
            // heaptrack writes to its working directory, whatever `-o` says.
            let dir = bench.results.path().display().to_string();
            let there = ["sh", "-c", "cd \"$0\" && exec \"$@\"", &dir];
            [&there[..], &[HEAPTRACK, "--pid", &pid.to_string()]].concat().into_iter().map(str::to_owned).collect()
        }
        Who::Peer(name) => {
            let peer = peer(name)?;
            anyhow::ensure!(Path::new(peer.needs).exists(), "there is no {}", peer.needs);
            match peer.how {
                How::Attach(command) => command(&place(bench, pid, &library, out)),
                _ => return Ok(None),
            }
        }
    };
    let mut tool = Tool::start(&words, bench.headers.as_deref())?;
    if matches!(who, Who::Peer(_)) {
        tool.await_probes(pid, work.allocator)?;
        return Ok(Some(tool));
    }
    let begun = Instant::now();
    while !here() {
        if let Some(said) = tool.ended()? {
            bail!("the profiler ended: {said}");
        }
        anyhow::ensure!(begun.elapsed() < PATIENCE, "no hooks after {} s: {}", PATIENCE.as_secs(), tool.said());
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(Some(tool))
}

fn peer(name: &str) -> anyhow::Result<&'static Peer> {
    PEERS.iter().find(|peer| peer.name == name).context("a profiler")
}

fn place<'a>(bench: &'a Bench, pid: u32, library: &'a Path, out: &'a Path) -> Place<'a> {
    let (heapbpf, dir): (&Path, &PathBuf) = (&bench.heapbpf, &bench.files.programs);
    Place { pid, library, out, heapbpf, program: dir, dir }
}

/// Waits until a process uses no CPU time.
fn await_stillness(pid: u32) -> anyhow::Result<()> {
    let begun = Instant::now();
    let mut last = clock(pid).context("it has ended")?;
    loop {
        std::thread::sleep(STILL);
        let now = clock(pid).context("it has ended")?;
        // A server does its housekeeping ten times a second.
        if now - last < 5_000_000 {
            return Ok(());
        }
        anyhow::ensure!(begun.elapsed() < PATIENCE, "it does not wait after {} s", PATIENCE.as_secs());
        last = now;
    }
}

/// CPU time of a process so far, ns. A zombie's can still be read. `None` if the process is gone.
fn clock(pid: u32) -> Option<u64> {
    cpu_time::of_process(pid).map(|seconds| (seconds * 1e9) as u64)
}
