//! Noise and cost of each sampling interval on a real program, for the choice of the default.

use std::collections::HashMap;

use anyhow::Context;
use heapbpf_bench::points_chart::{Axes, Line, chart};
use serde_json::Value;

use super::Options;
use super::programs::{record, stop, target};
use super::run::Bench;
use super::table::{figures, median};
use super::workloads::{WORKLOADS, Workload};

const INTERVALS: [u64; 8] = [1, 10, 100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000];
/// Stacks with at least this share of all bytes are compared.
const SHARE: f64 = 0.01;

/// Bytes allocated, by stack.
type Stacks = HashMap<String, f64>;

/// One recording.
struct Recorded {
    cpu_ns: f64,
    stacks: Stacks,
    samples: u64,
}

/// Measures and prints, and writes the table and the charts.
pub fn run(bench: &mut Bench, options: &Options) -> anyhow::Result<()> {
    let workload = WORKLOADS.iter().find(|workload| workload.name == "sqlite3").context("a workload")?;
    let mut bare = Vec::new();
    for _ in 0..options.rounds {
        bare.push(target(bench, workload, workload.slow)?.go()?.cpu_ns as f64);
    }
    let bare = median(bare).context("rounds")?;
    let mut text = format!(
        "{} sqlite3 fills a table with {} rows, under `--hook probe`; errors are of allocated bytes against a \
         recording of every allocation, of stacks with at least {:.0} % of all bytes: the mean of \
         |estimate − truth| / truth.\n\n\
         | R, bytes | samples | slow-down | error of a stack | error of the total |\n|---|---|---|---|---|\n",
        super::machine(options.rounds),
        workload.slow,
        100.0 * SHARE
    );
    let mut truth: Option<Stacks> = None;
    let (mut slow, mut noise) = (Vec::new(), Vec::new());
    for interval in INTERVALS {
        let runs = (0..options.rounds)
            .map(|seed| recorded(bench, workload, interval, seed))
            .collect::<anyhow::Result<Vec<Recorded>>>()?;
        let truth = truth.get_or_insert_with(|| runs[0].stacks.clone());
        let all: f64 = truth.values().sum();
        let of = |run: &Recorded| {
            let large = truth.iter().filter(|(_, bytes)| **bytes >= SHARE * all);
            let errors: Vec<f64> = large
                .map(|(stack, bytes)| (run.stacks.get(stack).copied().unwrap_or(0.0) / bytes - 1.0).abs())
                .collect();
            errors.iter().sum::<f64>() / errors.len().max(1) as f64
        };
        let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len().max(1) as f64;
        let error = mean(runs.iter().map(of).collect());
        let total = mean(runs.iter().map(|run| (run.stacks.values().sum::<f64>() / all - 1.0).abs()).collect());
        let slow_down = median(runs.iter().map(|run| run.cpu_ns / bare).collect()).unwrap_or(f64::NAN);
        text += &format!(
            "| {interval} | {} | {}× | {} % | {} % |\n",
            figures(runs[0].samples as f64),
            figures(slow_down),
            figures(100.0 * error),
            figures(100.0 * total)
        );
        slow.push((interval as f64, slow_down));
        noise.push((interval as f64, 100.0 * error));
        eprintln!("R = {interval} done");
    }
    println!("{text}");
    if let Some(document) = &options.document {
        let dir = document.parent().context("a directory")?.join("charts");
        let axes = |title, unit| Axes { title, places: "sampling interval R, bytes", unit, logarithmic: false };
        let write = |file: &str, axes: &Axes, points: &[(f64, f64)]| {
            std::fs::write(dir.join(file), chart(axes, &[Line { name: "sqlite3", points }]))
        };
        write("study-cost.svg", &axes("Slow-down of sqlite3 filling a table", "×"), &slow)?;
        write("study-noise.svg", &axes("Mean error of a stack's bytes", " %"), &noise)?;
        text += "\n![slow-down](charts/study-cost.svg)\n![error](charts/study-noise.svg)\n";
    }
    super::write(options, "study", &text)
}

fn recorded(bench: &Bench, workload: &Workload, interval: u64, seed: usize) -> anyhow::Result<Recorded> {
    let mut target = target(bench, workload, workload.slow)?;
    let (pid, interval) = (target.pid().to_string(), interval.to_string());
    let seed = (seed + 1).to_string();
    // Every allocation is sampled, and no stack may be lost because a ring is full.
    let sizes = ["--ring-bytes", "256MiB", "--stack-bytes", "8KiB"];
    let mut arguments = vec!["--hook", "probe", "--pid", &pid, "-i", &interval, "--seed", &seed];
    arguments.extend(sizes);
    let mut recording = record(bench, &arguments)?;
    let done = target.go()?;
    stop(&mut recording)?;
    let text = std::fs::read_to_string(bench.results.path().join("profile.json"))?;
    let profile: Value = serde_json::from_str(&text)?;
    let (mut stacks, mut samples) = (Stacks::new(), 0);
    for stack in profile["stacks"].as_array().into_iter().flatten() {
        let frames = stack["frames"].as_array().into_iter().flatten();
        let names: Vec<&str> = frames.map(|frame| frame["function"].as_str().unwrap_or("?")).collect();
        *stacks.entry(names.join(";")).or_default() += stack["alloc_bytes"]["estimate"].as_f64().unwrap_or(0.0);
        samples += stack["samples"].as_u64().unwrap_or(0);
    }
    Ok(Recorded { cpu_ns: done.cpu_ns as f64, stacks, samples })
}
