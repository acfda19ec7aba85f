//! The cost of the criteria other than bytes. All they add is the table of trials.

use heapbpf_kernel::guardian::Guardian;
use heapbpf_profile::model::Criterion;
use heapbpf_record::cost::quantiles::{median, spread};
use heapbpf_record::cost::trial::{Allocator, Recording, Setting};

use super::Options;
use super::pinned::Library;

/// Pairs of one slice: about 20 ms.
const PAIRS: u64 = 20_000;
/// Sampling interval, bytes. The other criteria use an interval that gives as many samples.
const INTERVAL: u64 = 512 << 10;

struct Row {
    name: &'static str,
    recording: Recording,
    ns: Vec<f64>,
    /// Ratio of each slice to the mean of the slices by bytes just before and after it.
    to_bytes: Vec<f64>,
}

/// Measures and prints pairs, with the live map and with `--no-live`. In the latter, the allocation probe's share of
/// the time is largest.
pub fn run(options: &Options, object: &[u8], library: &Library) -> anyhow::Result<()> {
    compare(options, object, library, true)?;
    compare(options, object, library, false)
}

/// Compares the other criteria with sampling by bytes. A second recording by bytes shows the error of the comparison
/// itself.
fn compare(options: &Options, object: &[u8], library: &Library, live: bool) -> anyhow::Result<()> {
    let mut workload = library.start(&options.pairs, &["1"])?;
    let pid = workload.pid();
    let allocator = Allocator::of_process(pid)?;
    let load = |criterion, interval| {
        let setting = Setting { interval, criterion, live, ..Setting::DEFAULT };
        Recording::load(object, setting, &allocator, pid, &Guardian::default())
    };
    let mut by_bytes = load(Criterion::Bytes, INTERVAL)?;
    let in_allocations = (INTERVAL / options.size.max(1)).max(1);
    let mut rows = Vec::new();
    for (name, criterion, interval) in [
        ("by bytes, again", Criterion::Bytes, INTERVAL),
        ("by allocations", Criterion::Allocations, in_allocations),
        ("by size class", Criterion::SizeClass, in_allocations),
    ] {
        rows.push(Row { name, recording: load(criterion, interval)?, ns: Vec::new(), to_bytes: Vec::new() });
    }
    let mut slice = |recording: &mut Recording| -> anyhow::Result<f64> {
        recording.on()?;
        workload.run(200, options.size)?;
        let spent = workload.run(PAIRS, options.size)?;
        recording.off();
        Ok(spent.cpu_ns as f64 / PAIRS as f64)
    };
    let mut bytes = Vec::new();
    for round in 0..=options.rounds {
        let mut before = slice(&mut by_bytes)?;
        for row in &mut rows {
            let ns = slice(&mut row.recording)?;
            let after = slice(&mut by_bytes)?;
            // The first round warms up.
            if round > 0 {
                row.ns.push(ns);
                row.to_bytes.push(ns / (0.5 * (before + after)));
                bytes.push(after);
            }
            before = after;
        }
    }
    let title = if live { "one sample per 512 KiB, per pair" } else { "the same with --no-live" };
    println!("\n{title:<32} {:>9}            of by bytes [quartiles]", "ns");
    println!("{:<32} {:>9.1}", "by bytes", median(&bytes));
    for row in &rows {
        println!("{:<32} {:>9.1}            {}", row.name, median(&row.ns), spread(&row.to_bytes));
    }
    Ok(())
}
