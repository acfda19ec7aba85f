//! Programs that nobody here wrote, under `--all --max-overhead none`, against what their allocation rate predicts.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail};
use sampler_user::cost::trial::{Allocator, Where};
use serde_json::Value;

use super::Options;
use super::run::Bench;
use super::table::{figures, median};
use super::target::{Start, Target};
use super::workloads::{Protocol, WORKLOADS, Workload};

/// How much above the floor heapbpf may be.
const ALLOWED: f64 = 1.15;

/// What the probes of a program's calls cost if they do nothing, nanoseconds.
struct FloorCosts {
    allocation: f64,
    free: f64,
}

/// Measures and prints the table, or writes it.
pub fn run(bench: &mut Bench, options: &Options) -> anyhow::Result<()> {
    let mut text = super::machine(options.rounds);
    let floor = floor_costs(bench, options.rounds)?;
    text += &format!(
        " A probe that does nothing takes {} ns at malloc and {} ns at free here.\n\n",
        figures(floor.allocation),
        figures(floor.free)
    );
    text += "| program | CPU time, s | allocation calls | frees | no-op probes alone | predicted, at most | under heapbpf \
             `--all --max-overhead none` | of what was predicted | with `--no-live` |\n|---|---|---|---|---|---|---|---|---|\n";
    for workload in WORKLOADS.iter().filter(|workload| workload.protocol == Protocol::ToEnd) {
        let (calls, frees) = calls(bench, workload)?;
        let (mut bares, mut noops, mut alls, mut no_lives) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for _ in 0..options.rounds {
            let bare = once(bench, workload, Under::Nothing)?;
            let slow = |bench: &mut Bench, under| anyhow::Ok(once(bench, workload, under)? / bare);
            noops.push(slow(bench, Under::Floor)?);
            alls.push(slow(bench, Under::Heapbpf(&[]))?);
            no_lives.push(slow(bench, Under::Heapbpf(&["--no-live"]))?);
            bares.push(bare);
        }
        let middle = |values: Vec<f64>| median(values).unwrap_or(f64::NAN);
        let (bare, all) = (middle(bares), middle(alls));
        let probes = calls as f64 * floor.allocation + frees as f64 * floor.free;
        let predicted = 1.0 + ALLOWED * 1e-9 * probes / bare;
        text += &format!(
            "| {} ({} × {}) | {} | {} | {} | {}× | {}× | {}× | {:.2} | {}× |\n",
            workload.name,
            workload.middle,
            workload.unit,
            figures(bare),
            figures(calls as f64),
            figures(frees as f64),
            figures(middle(noops)),
            figures(predicted),
            figures(all),
            (all - 1.0) / (predicted - 1.0),
            figures(middle(no_lives)),
        );
        eprintln!("{} done", workload.name);
    }
    println!("{text}");
    super::write(options, "programs", &text)
}

/// What a program runs under.
#[derive(Clone, Copy)]
enum Under<'a> {
    Nothing,
    Floor,
    Heapbpf(&'a [&'a str]),
}

pub fn target(bench: &Bench, workload: &Workload, operations: u64) -> anyhow::Result<Target> {
    Target::start(&Start { workload, operations, variables: &[], files: &bench.files, library: &bench.library })
}

/// CPU seconds of one run.
fn once(bench: &mut Bench, workload: &Workload, under: Under) -> anyhow::Result<f64> {
    let mut recording = match under {
        Under::Heapbpf(options) => {
            let mut all = vec!["--all", "--max-overhead", "none", "-i", "512KiB"];
            all.extend(options);
            Some(record(bench, &all)?)
        }
        _ => None,
    };
    let mut target = target(bench, workload, workload.middle)?;
    if matches!(under, Under::Floor) {
        let allocator = Allocator::of_process(target.pid())?;
        bench.floor.on(&allocator, target.pid(), Where::Everywhere, false)?;
    }
    let done = target.go();
    bench.floor.off();
    if let Some(recording) = &mut recording {
        stop(recording)?;
    }
    Ok(done?.cpu_ns as f64 * 1e-9)
}

/// Allocation calls and frees of a program, as heapbpf counts them (exactly).
fn calls(bench: &mut Bench, workload: &Workload) -> anyhow::Result<(u64, u64)> {
    let mut target = target(bench, workload, workload.middle)?;
    let mut recording = record(bench, &["--pid", &target.pid().to_string(), "-i", "0"])?;
    target.go()?;
    stop(&mut recording)?;
    let text = std::fs::read_to_string(bench.results.path().join("stats.json"))?;
    let stats: Value = serde_json::from_str(&text)?;
    let number = |name: &str| stats[name].as_u64().with_context(|| format!("no {name} in the statistics"));
    Ok((number("hits")? + number("inner")?, number("frees_seen")?))
}

/// Costs of a probe that does nothing, from the workload of pairs.
fn floor_costs(bench: &mut Bench, rounds: usize) -> anyhow::Result<FloorCosts> {
    let pairs = &WORKLOADS[0];
    let mut costs: [Vec<f64>; 3] = Default::default();
    for _ in 0..rounds {
        for (place, into) in [None, Some(Where::Allocations), Some(Where::Everywhere)].into_iter().zip(&mut costs) {
            let mut target = target(bench, pairs, pairs.middle)?;
            if let Some(place) = place {
                let allocator = Allocator::of_process(target.pid())?;
                bench.floor.on(&allocator, target.pid(), place, false)?;
            }
            let done = target.go();
            bench.floor.off();
            into.push(done?.cpu_ns as f64 / pairs.middle as f64);
            target.end();
        }
    }
    let [bare, allocations, both] = costs.map(|values| median(values).unwrap_or(f64::NAN));
    Ok(FloorCosts { allocation: allocations - bare, free: both - allocations })
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
            // What it says later must not block it.
            std::thread::spawn(move || lines.for_each(drop));
            return Ok(child);
        }
        eprintln!("{line}");
    }
    bail!("heapbpf ended before it recorded: {}", child.wait()?)
}

pub fn stop(child: &mut Child) -> anyhow::Result<()> {
    if child.try_wait()?.is_none() {
        // SAFETY: a signal to our own child, which was not waited for.
        unsafe { libc::kill(child.id().cast_signed(), libc::SIGINT) };
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("heapbpf failed: {status}");
    }
    Ok(())
}
