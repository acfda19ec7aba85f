//! Real programs under `--hook probe --all --max-overhead none`, compared with the cost that their allocation rate
//! predicts.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail};
use heapbpf_kernel::guardian::Guardian;
use heapbpf_kernel::object::aligned;
use heapbpf_record::cost::quantiles::{quantile, spread};
use heapbpf_record::cost::trial::{Allocator, Recording, Setting, Where};
use serde_json::Value;

use super::Options;
use super::run::Bench;
use super::table::figures;
use super::target::{Start, Target};
use super::workloads::{Protocol, WORKLOADS, Workload};

/// Largest allowed cost of heapbpf, as a multiple of the baseline.
const ALLOWED: f64 = 1.15;

/// Cost of a no-op probe on an allocation and on a free, nanoseconds.
struct BaselineCosts {
    allocation: f64,
    free: f64,
}

/// Measures, and prints the table.
pub fn run(bench: &mut Bench, options: &Options) -> anyhow::Result<()> {
    let mut text = super::machine(options.rounds);
    let baseline = baseline_costs(bench, options.rounds)?;
    text += &format!(
        " A probe that does nothing takes {} ns at malloc and {} ns at free in a loop of pairs here.\n\n",
        figures(baseline.allocation),
        figures(baseline.free)
    );
    text += "| program | CPU time, s | allocation calls | frees | no-op probes alone | under heapbpf `--hook probe \
             --all --max-overhead none` | what it adds, of what no-op probes add [quartiles] | predicted, at most | of \
             what was predicted | with `--no-live` |\n|---|---|---|---|---|---|---|---|---|---|\n";
    let wanted = |workload: &&Workload| {
        workload.protocol == Protocol::ToEnd && super::is_wanted(workload.name, &options.workloads)
    };
    for workload in WORKLOADS.iter().filter(wanted) {
        let (calls, frees) = calls(bench, workload)?;
        let mut conditions = conditions(bench, workload, options)?;
        let mut bares = Vec::new();
        for _ in 0..options.rounds {
            let bare = once(bench, workload, &mut Under::Nothing)?;
            let mut baselines = [slow_down(bench, workload, &mut Under::Baseline, bare)?, f64::NAN];
            for condition in &mut conditions {
                let slow = slow_down(bench, workload, &mut condition.under, bare)?;
                baselines[1] = slow_down(bench, workload, &mut Under::Baseline, bare)?;
                condition.baselines.extend(baselines);
                condition.slow.push(slow);
                condition.to_baseline.push((slow - 1.0) / (0.5 * (baselines[0] + baselines[1]) - 1.0));
                baselines[0] = baselines[1];
            }
            bares.push(bare);
        }
        for condition in &conditions {
            println!("{:<10} {:<24} {}", workload.name, condition.name, spread(&condition.to_baseline));
        }
        let ([all, no_live, ..], true) = (&conditions[..], options.only.is_empty()) else { continue };
        let (bare, slow) = (quantile(&bares, 0.5), quantile(&all.slow, 0.5));
        let probes = calls as f64 * baseline.allocation + frees as f64 * baseline.free;
        let predicted = 1.0 + ALLOWED * 1e-9 * probes / bare;
        text += &format!(
            "| {} ({} × {}) | {} | {} | {} | {}× | {}× | **{}** | {}× | {:.2} | {}× |\n",
            workload.name,
            workload.fast,
            workload.unit,
            figures(bare),
            figures(calls as f64),
            figures(frees as f64),
            figures(quantile(&all.baselines, 0.5)),
            figures(slow),
            spread(&all.to_baseline),
            figures(predicted),
            (slow - 1.0) / (predicted - 1.0),
            figures(quantile(&no_live.slow, 0.5)),
        );
        eprintln!("{} done", workload.name);
    }
    if options.only.is_empty() {
        println!("{text}");
    }
    Ok(())
}

/// The profiler, if any, that a program runs under.
enum Under<'a> {
    Nothing,
    Baseline,
    /// The command, with these options and `--all`.
    Heapbpf(&'a [&'a str]),
    /// The BPF programs of an object, on this process only and without the daemon.
    Object(Box<Recording>),
}

struct Condition<'a> {
    name: String,
    under: Under<'a>,
    /// Slow-downs.
    slow: Vec<f64>,
    /// Slow-downs by the no-op probes, just before and after each.
    baselines: Vec<f64>,
    /// Ratio of the time added to that added by the no-op probes.
    to_baseline: Vec<f64>,
}

impl<'a> Condition<'a> {
    fn new(name: impl Into<String>, under: Under<'a>) -> Self {
        Self { name: name.into(), under, slow: Vec::new(), baselines: Vec::new(), to_baseline: Vec::new() }
    }
}

/// The conditions: the command with and without frees, then each requested object.
fn conditions<'a>(bench: &Bench, workload: &Workload, options: &Options) -> anyhow::Result<Vec<Condition<'a>>> {
    let mut conditions = vec![
        Condition::new("--all", Under::Heapbpf(&[])),
        Condition::new("--all --no-live", Under::Heapbpf(&["--no-live"])),
    ];
    for path in &options.object {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let target = target(bench, workload, workload.fast)?;
        let allocator = Allocator::of_process(target.pid())?;
        let setting = Setting { functions: None, ..Setting::DEFAULT };
        let recording =
            Recording::load(aligned(&std::fs::read(path)?), setting, &allocator, target.pid(), &Guardian::default())?;
        conditions.push(Condition::new(name, Under::Object(Box::new(recording))));
    }
    conditions.retain(|condition| super::is_wanted(&condition.name, &options.only));
    Ok(conditions)
}

fn slow_down(bench: &mut Bench, workload: &Workload, under: &mut Under, bare: f64) -> anyhow::Result<f64> {
    Ok(once(bench, workload, under)? / bare)
}

pub fn target(bench: &Bench, workload: &Workload, operations: u64) -> anyhow::Result<Target> {
    Target::start(&Start { workload, operations, variables: &[], files: &bench.files, library: &bench.library })
}

/// CPU seconds of one run.
fn once(bench: &mut Bench, workload: &Workload, under: &mut Under) -> anyhow::Result<f64> {
    // The process waits with the C library mapped, so that probes are in place before the program starts.
    let mut target = target(bench, workload, workload.fast)?;
    let mut recording = match under {
        Under::Heapbpf(options) => {
            let mut all = vec!["--hook", "probe", "--all", "--max-overhead", "none", "-i", "512KiB"];
            all.extend(*options);
            Some(record(bench, &all)?)
        }
        _ => None,
    };
    match under {
        Under::Baseline => {
            let allocator = Allocator::of_process(target.pid())?;
            bench.baseline.on(&allocator, target.pid(), Where::Everywhere, false)?;
        }
        Under::Object(programs) => {
            programs.only_for(target.pid());
            programs.on()?;
        }
        _ => {}
    }
    let done = target.go();
    bench.baseline.off();
    if let Under::Object(programs) = under {
        programs.off();
    }
    if let Some(recording) = &mut recording {
        stop(recording)?;
    }
    Ok(done?.cpu_ns as f64 * 1e-9)
}

/// Exact numbers of allocation calls and frees of a program, counted by heapbpf.
fn calls(bench: &mut Bench, workload: &Workload) -> anyhow::Result<(u64, u64)> {
    let mut target = target(bench, workload, workload.fast)?;
    let mut recording = record(bench, &["--hook", "probe", "--pid", &target.pid().to_string(), "-i", "0"])?;
    target.go()?;
    stop(&mut recording)?;
    let text = std::fs::read_to_string(bench.results.path().join("stats.json"))?;
    let stats: Value = serde_json::from_str(&text)?;
    let number = |name: &str| stats[name].as_u64().with_context(|| format!("no {name} in the statistics"));
    Ok((number("hits")? + number("inner")?, number("frees_seen")?))
}

/// Measures the cost of no-op probes on the workload of pairs.
fn baseline_costs(bench: &mut Bench, rounds: usize) -> anyhow::Result<BaselineCosts> {
    let pairs = &WORKLOADS[0];
    let mut costs: [Vec<f64>; 3] = Default::default();
    for _ in 0..rounds {
        for (place, into) in [None, Some(Where::Allocations), Some(Where::Everywhere)].into_iter().zip(&mut costs) {
            let mut target = target(bench, pairs, pairs.middle)?;
            if let Some(place) = place {
                let allocator = Allocator::of_process(target.pid())?;
                bench.baseline.on(&allocator, target.pid(), place, false)?;
            }
            let done = target.go();
            bench.baseline.off();
            into.push(done?.cpu_ns as f64 / pairs.middle as f64);
            target.end();
        }
    }
    let [bare, allocations, both] = costs.map(|values| quantile(&values, 0.5));
    Ok(BaselineCosts { allocation: allocations - bare, free: both - allocations })
}

/// Starts heapbpf and waits until its probes are in place.
pub fn record(bench: &Bench, arguments: &[&str]) -> anyhow::Result<Child> {
    let file = |name: &str| bench.results.path().join(name);
    let mut command = Command::new(&bench.heapbpf);
    command.args(arguments).args(["--quiet", "--force"]);
    command.arg("-o").arg(file("profile.json")).arg("--stats").arg(file("stats.json"));
    wait_for_probes(command.stdout(Stdio::null()).stderr(Stdio::piped()), &bench.heapbpf)
}

fn wait_for_probes(command: &mut Command, program: &Path) -> anyhow::Result<Child> {
    let mut child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
    let mut lines = BufReader::new(child.stderr.take().context("piped")?).lines();
    while let Some(Ok(line)) = lines.next() {
        if line.starts_with("heapbpf: recording") {
            // Later output is discarded, so that a full pipe does not block it.
            std::thread::spawn(move || lines.for_each(drop));
            return Ok(child);
        }
        eprintln!("{line}");
    }
    bail!("heapbpf ended before it recorded: {}", child.wait()?)
}

pub fn stop(child: &mut Child) -> anyhow::Result<()> {
    if child.try_wait()?.is_none() {
        // SAFETY: `kill` takes plain integers. The child has not been waited for, so its PID is still its own.
        unsafe { libc::kill(child.id().cast_signed(), libc::SIGINT) };
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("heapbpf failed: {status}");
    }
    Ok(())
}
