//! Real programs under `--hook probe --all --max-overhead none`, compared with the cost that their allocation rate
//! predicts.

use anyhow::Context;
use heapbpf_bench::recording::{start, stop};
use heapbpf_record::cost::quantiles::{quantile, spread};
use heapbpf_record::cost::trial::{Allocator, Where};
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
        let (mut all, mut no_live) = (Condition::default(), Condition::default());
        let mut bares = Vec::new();
        for _ in 0..options.rounds {
            let bare = once(bench, workload, Under::Nothing)?;
            let mut before = once(bench, workload, Under::Baseline)? / bare;
            let recordings: [(&mut Condition, &[&str]); 2] = [(&mut all, &[]), (&mut no_live, &["--no-live"])];
            for (condition, arguments) in recordings {
                let slow = once(bench, workload, Under::Heapbpf(arguments))? / bare;
                let after = once(bench, workload, Under::Baseline)? / bare;
                condition.baselines.extend([before, after]);
                condition.slow.push(slow);
                condition.to_baseline.push((slow - 1.0) / (0.5 * (before + after) - 1.0));
                before = after;
            }
            bares.push(bare);
        }
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
    println!("{text}");
    Ok(())
}

/// What a program runs under.
#[derive(Clone, Copy)]
enum Under<'a> {
    Nothing,
    Baseline,
    /// The command, with these options and `--all`.
    Heapbpf(&'a [&'a str]),
}

/// What was measured under one kind of recording.
#[derive(Default)]
struct Condition {
    /// Slow-downs.
    slow: Vec<f64>,
    /// Slow-downs by the no-op probes, just before and after each.
    baselines: Vec<f64>,
    /// Ratio of the time added to that added by the no-op probes.
    to_baseline: Vec<f64>,
}

fn target(bench: &Bench, workload: &Workload, operations: u64) -> anyhow::Result<Target> {
    Target::start(&Start { workload, operations, variables: &[], files: &bench.files, library: &bench.library })
}

/// CPU seconds of one run.
fn once(bench: &mut Bench, workload: &Workload, under: Under) -> anyhow::Result<f64> {
    // The process waits with the C library mapped, so that probes are in place before the program starts.
    let mut target = target(bench, workload, workload.fast)?;
    let mut recording = None;
    match under {
        Under::Nothing => {}
        Under::Baseline => {
            let allocator = Allocator::of_process(target.pid())?;
            bench.baseline.on(&allocator, target.pid(), Where::Everywhere, false)?;
        }
        Under::Heapbpf(options) => {
            let all = ["--hook", "probe", "--all", "--max-overhead", "none", "-i", "512KiB"];
            recording = Some(start(&bench.heapbpf, bench.results.path(), &[&all[..], options].concat())?);
        }
    }
    let done = target.go();
    bench.baseline.off();
    if let Some(recording) = &mut recording {
        stop(recording)?;
    }
    Ok(done?.cpu_ns as f64 * 1e-9)
}

/// Exact numbers of allocation calls and frees of a program, counted by heapbpf.
fn calls(bench: &mut Bench, workload: &Workload) -> anyhow::Result<(u64, u64)> {
    let mut target = target(bench, workload, workload.fast)?;
    let pid = target.pid().to_string();
    let arguments = ["--hook", "probe", "--pid", &pid, "-i", "0"];
    let mut recording = start(&bench.heapbpf, bench.results.path(), &arguments)?;
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
