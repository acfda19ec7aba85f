//! Compares heap profilers: the cost to a workload, the profiler's own use of resources, and the error of its
//! estimates.

mod inside;
mod parse;
mod peers;
mod process;
mod run;
mod table;
mod target;
mod workloads;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Parser;
use heapbpf_bench::describe_machine;
use heapbpf_kernel::guardian::Guardian;
use heapbpf_kernel::object::aligned;
use heapbpf_record::cost::cpus::pin;
use heapbpf_record::cost::library::PrivateLibrary;
use heapbpf_record::cost::trial::Baseline;
use peers::{PEERS, Peer};
use run::Bench;
use table::Results;
use workloads::{Files, WORKLOADS, Workload};

/// Profilers side by side on the same workloads, in interleaved rounds.
#[derive(Parser)]
struct Options {
    /// Directory of the compiled workloads
    #[arg(long)]
    programs: PathBuf,
    /// Directory of their sources
    #[arg(long)]
    sources: PathBuf,
    /// The program `heapbpf`
    #[arg(long)]
    heapbpf: PathBuf,
    /// Kernel headers for bcc
    #[arg(long)]
    headers: Option<PathBuf>,
    /// Document to write the table into; without it the table is only printed
    #[arg(long)]
    document: Option<PathBuf>,
    /// Interleaved rounds
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Fewer profilers and workloads
    #[arg(long)]
    quick: bool,
    /// Only profilers whose name contains one of these
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Only these workloads
    #[arg(long, value_delimiter = ',')]
    workloads: Vec<String>,
    /// Real programs with inline hooks, beside profilers that are in the process or trace it, instead
    #[arg(long)]
    inline: bool,
}

/// With `--quick`, no run is started after this time, so that even a busy machine finishes within three minutes.
const LONGEST_QUICK: Duration = Duration::from_secs(130);

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let object = aligned(&heapbpf_testing::bpf_object().context("the BPF programs are not built")?);
    pin(0, |cpu| cpu == 0);
    let results = tempfile::tempdir()?;
    let inputs = results.path().with_extension("inputs");
    std::fs::create_dir_all(&inputs)?;
    let mut bench = Bench {
        files: Files { programs: options.programs.clone(), sources: options.sources.clone(), inputs: inputs.clone() },
        heapbpf: options.heapbpf.clone(),
        library: libraries()?,
        baseline: Baseline::load(object, &Guardian::default())?,
        results,
        headers: options.headers.clone(),
    };
    let result = if options.inline { inside::run(&mut bench, &options) } else { compare(&mut bench, &options) };
    let _ = std::fs::remove_dir_all(inputs);
    result
}

/// Copies the C library for the workloads, and jemalloc's if it exists.
fn libraries() -> anyhow::Result<PrivateLibrary> {
    let library = PrivateLibrary::copy()?.context("this program uses no libc.so.6")?;
    let path = Path::new(peers::JEMALLOC);
    if path.exists() {
        std::fs::copy(path, library.dir().join(workloads::JEMALLOC)).context("cannot copy jemalloc")?;
    }
    Ok(library)
}

/// Returns the first missing file that a measurement needs, if any. Prints it in the first round.
fn missing<'a>(name: &str, needs: &[&'a str], round: usize) -> Option<&'a str> {
    let missing = needs.iter().find(|file| !file.is_empty() && !Path::new(file).exists())?;
    if round == 0 {
        eprintln!("NOT MEASURED: {name}: there is no {missing}");
    }
    Some(missing)
}

fn compare(bench: &mut Bench, options: &Options) -> anyhow::Result<()> {
    let named = |peer: &&Peer| peer.against == peer.name || is_wanted(peer.name, &options.only);
    let peers: Vec<&'static Peer> = PEERS.iter().filter(|peer| (peer.quick || !options.quick) && named(peer)).collect();
    let workloads: Vec<&'static Workload> =
        WORKLOADS.iter().filter(|it| (it.quick || !options.quick) && is_wanted(it.name, &options.workloads)).collect();
    let mut results = Results::default();
    let (mut number, begun) = (0, Instant::now());
    for round in 0..options.rounds {
        for workload in &workloads {
            if options.quick && begun.elapsed() > LONGEST_QUICK {
                eprintln!("NOT MEASURED for want of time: {}, round {}", workload.name, round + 1);
                continue;
            }
            if let Some(file) = missing(workload.name, workload.needs, round) {
                results.fail("all", workload.name, format!("there is no {file}"));
                continue;
            }
            // Each round begins with a different profiler; the bare workload is measured first and last.
            let turned = (0..peers.len()).map(|i| peers[(i + round) % peers.len()]);
            for peer in std::iter::once(peers[0]).chain(turned).chain([peers[0]]) {
                number += 1;
                if let Some(file) = missing(peer.name, &[peer.needs], round) {
                    results.fail(peer.name, "this machine", format!("there is no {file}"));
                    continue;
                }
                match bench.run(peer, workload, number) {
                    Ok(measured) => results.add(peer, workload, round, measured),
                    Err(error) => {
                        eprintln!("{} on {}: {error:#}", peer.name, workload.name);
                        results.fail(peer.name, workload.name, format!("{error:#}"));
                    }
                }
            }
            eprintln!("round {} of {}: {} done", round + 1, options.rounds, workload.name);
        }
    }
    let (machine, table) = (machine(options.rounds), results.markdown(&peers, &workloads));
    let text = format!("{machine} heapbpf runs with `--hook probe`.\n\n{table}");
    println!("{text}\n{}", targets(&results));
    write(options, "peers", &format!("{text}\n{}", targets(&results)))
}

/// Whether a name contains one of the requested parts, or none was requested.
fn is_wanted(name: &str, only: &[String]) -> bool {
    only.is_empty() || only.iter().any(|part| name.contains(part.as_str()))
}

/// Prints the required ratios, from this run.
fn targets(results: &Results) -> String {
    let added = |peer: &str| {
        let figure = |it: &run::Measured| it.cpu_ns;
        results.compared(peer, "bare", "pairs", |own, bare| own.cpu_ns - bare, figure)
    };
    let mut text = String::new();
    let own = added("heapbpf");
    let mut line = |what: &str, ratio: Option<f64>, wanted: &str| {
        if let Some(ratio) = ratio {
            text += &format!("- {what}: {ratio:.3} (wanted: {wanted})\n");
        }
    };
    let ratio = |a: Option<f64>, b: Option<f64>| Some(a? / b?);
    line(
        "heapbpf's pair to that of the no-op probes",
        ratio(own, added("no-op probes (the baseline)")),
        "at most 1.15",
    );
    line("`--no-live` to the full pair", ratio(added("heapbpf `--no-live`"), own), "at most 0.55");
    line("bcc memleak's pair to heapbpf's", ratio(added("bcc memleak"), own), "at least 8");
    line("the bpftrace script's pair to heapbpf's", ratio(added("bpftrace script"), own), "at least 8");
    text
}

/// A sentence about the machine and the rounds.
fn machine(rounds: usize) -> String {
    format!("Measured on a {}; medians of {rounds} interleaved rounds, CPU time of the target.", describe_machine())
}

/// Writes a table into the document, if there is one.
fn write(options: &Options, name: &str, text: &str) -> anyhow::Result<()> {
    let Some(path) = &options.document else { return Ok(()) };
    heapbpf_bench::replace_in_document(path, name, text)?;
    eprintln!("written to {}", path.display());
    Ok(())
}
