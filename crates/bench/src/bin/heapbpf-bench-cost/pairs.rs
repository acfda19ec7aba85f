//! The cost of the BPF programs to the target, without a daemon: programs are attached and detached in interleaved
//! rounds.

use heapbpf_bench::quantiles::{median, spread};
use heapbpf_kernel::guardian::Guardian;
use heapbpf_kernel::programs::LinkKind;
use heapbpf_record::cost::trial::{Allocator, Baseline, Recording, Setting};
use heapbpf_record::cost::workload::Workload;
use sampler_ebpf::abi::stack_kind;

use super::pinned::Library;
use super::{Options, SIZE};

/// Pairs in one slice, at about a microsecond each.
const PAIRS: u64 = 40_000;
/// Pairs in one slice with other work between the calls, at about three microseconds each.
const COLD_PAIRS: u64 = 20_000;
/// Pairs in one slice if each is sampled. Their records fit in the rings.
const SAMPLED_PAIRS: u64 = 6_000;
/// Call depth below `main` at which a copied stack has about 8 KiB.
const DEPTH: &str = "40";

enum What {
    Bare,
    Baseline(Where, bool),
    Heapbpf(Box<Recording>),
}

struct Condition {
    name: String,
    what: What,
    pairs: u64,
    ns: Vec<f64>,
    /// The mean of the baselines just before and after each slice.
    baselines: Vec<f64>,
    records: usize,
}

impl Condition {
    fn new(name: impl Into<String>, pairs: u64, what: What) -> Self {
        Self { name: name.into(), what, pairs, ns: Vec::new(), baselines: Vec::new(), records: 0 }
    }

    /// Drops the measurements so far.
    fn forget(&mut self) {
        self.ns.clear();
        self.baselines.clear();
        self.records = 0;
    }
}

struct Bench {
    workload: Workload,
    allocator: Allocator,
    baseline: Baseline,
    /// Whether other work is done between the calls.
    cold: bool,
}

impl Bench {
    /// CPU time of one slice, nanoseconds per pair, and the number of records.
    fn slice(&mut self, what: &mut What, pairs: u64) -> anyhow::Result<(f64, usize)> {
        let pid = self.workload.pid();
        match what {
            What::Bare => {}
            What::Baseline(place, perf) => attach(&mut self.baseline, &self.allocator, pid, *place, *perf)?,
            What::Heapbpf(recording) => recording.on()?,
        }
        // The first calls after a change run with cold caches and create the threads' state.
        // Cold: with other work between the calls. Only the test program `pair_loop` does that.
        let word = if self.cold { "cold" } else { "run" };
        let mut run = |pairs| self.workload.request(&format!("{word} {pairs} {SIZE}\n"));
        run(200)?;
        let spent = run(pairs)?;
        let mut records = 0;
        match what {
            What::Bare => {}
            What::Baseline(..) => self.baseline.off(),
            What::Heapbpf(recording) => records = recording.off(),
        }
        Ok((spent.cpu_ns as f64 / pairs as f64, records))
    }
}

/// Measures and prints every condition.
pub fn run(options: &Options, object: &'static [u8], library: &Library) -> anyhow::Result<()> {
    let workload = library.start(&options.pairs, &["1"])?;
    let pid = workload.pid();
    let allocator = Allocator::of_process(pid)?;
    let plain = Setting::DEFAULT;
    let heapbpf = |object: &[u8], setting: Setting| -> anyhow::Result<What> {
        Ok(What::Heapbpf(Box::new(Recording::load(object, setting, &allocator, pid, &Guardian::default())?)))
    };
    let mut conditions = vec![
        Condition::new("bare", 50 * PAIRS, What::Bare),
        Condition::new("no-op at malloc and free", PAIRS, What::Baseline(Where::Everywhere, false)),
        Condition::new("no-op at malloc", PAIRS, What::Baseline(Where::Allocations, false)),
        Condition::new("512 KiB", PAIRS, heapbpf(object, plain)?),
        Condition::new("512 KiB --no-live", PAIRS, heapbpf(object, Setting { live: false, ..plain })?),
    ];
    for (name, interval, pairs) in [("-i 0", 0, PAIRS), ("4 KiB", 4096, PAIRS), ("-i 1", 1, SAMPLED_PAIRS)] {
        conditions.push(Condition::new(name, pairs, heapbpf(object, Setting { interval, ..plain })?));
    }
    let every = Setting { interval: 1, live: false, ..plain };
    conditions.push(Condition::new("-i 1 --no-live", SAMPLED_PAIRS, heapbpf(object, every)?));
    for (name, link) in [("--link multi", LinkKind::Multi), ("--link perf", LinkKind::Perf)] {
        conditions.push(Condition::new(name, PAIRS, heapbpf(object, Setting { link: Some(link), ..plain })?));
    }
    let returns = What::Baseline(Where::AllocationsAndReturns, false);
    conditions.push(Condition::new("no-op at malloc and its return", PAIRS, returns));
    conditions.push(Condition::new("no-op at both, perf links", PAIRS, What::Baseline(Where::Everywhere, true)));
    println!(
        "{}: malloc {}, free {}\n",
        allocator.name(),
        allocator.kind("malloc").unwrap_or("?"),
        allocator.kind("free").unwrap_or("?")
    );
    let baseline = Baseline::load(object, &Guardian::default())?;
    let mut bench = Bench { workload, allocator, baseline, cold: false };
    measure(&mut bench, &mut conditions, PAIRS, options.rounds)?;
    print("per pair", &conditions, 0.0);
    conditions.retain(|condition| condition.pairs != SAMPLED_PAIRS && !condition.name.contains("link"));
    conditions.iter_mut().for_each(Condition::forget);
    bench.cold = true;
    measure(&mut bench, &mut conditions, COLD_PAIRS, options.rounds)?;
    let bare = median(&conditions[0].ns);
    print("what it adds with other work between the calls", &conditions, bare);
    sampled(options, object, library)
}

fn measure(bench: &mut Bench, conditions: &mut [Condition], pairs: u64, rounds: usize) -> anyhow::Result<()> {
    let mut baseline = What::Baseline(Where::Everywhere, false);
    for round in 0..=rounds {
        let mut before = bench.slice(&mut baseline, pairs)?.0;
        for condition in conditions.iter_mut() {
            let (ns, records) = bench.slice(&mut condition.what, condition.pairs.min(pairs))?;
            let after = bench.slice(&mut baseline, pairs)?.0;
            // The first round warms up.
            if round > 0 {
                condition.ns.push(ns);
                condition.baselines.push(0.5 * (before + after));
                condition.records += records;
            }
            before = after;
        }
    }
    Ok(())
}

/// Prints a table. `own` is the workload's time without probes, ns per pair, if only the added time is compared, and 0
/// otherwise.
fn print(title: &str, conditions: &[Condition], own: f64) {
    let bare = median(&conditions[0].ns);
    println!("{title:<48} {:>9} {:>9}  of the baseline [quartiles]  records per pair", "ns", "added");
    for condition in conditions {
        let ns = median(&condition.ns);
        let rounds = condition.ns.len() as u64;
        let to_baseline: Vec<f64> =
            condition.ns.iter().zip(&condition.baselines).map(|(ns, baseline)| (ns - own) / (baseline - own)).collect();
        println!(
            "{:<48} {ns:>9.1} {:>9.1}  {:<27} {:>8.4}",
            condition.name,
            ns - bare,
            spread(&to_baseline),
            condition.records as f64 / (condition.pairs * rounds).max(1) as f64,
        );
    }
    println!();
}

/// Measures and prints the cost of a sampled allocation: both traps, 8 KiB of stack, records, the live map.
fn sampled(options: &Options, object: &[u8], library: &Library) -> anyhow::Result<()> {
    let mut workload = library.start(&options.pairs, &["1", DEPTH])?;
    let pid = workload.pid();
    let allocator = Allocator::of_process(pid)?;
    let load = |setting: Setting| Recording::load(object, setting, &allocator, pid, &Guardian::default());
    let mut bare = Vec::new();
    let mut rows = Vec::new();
    for (name, kind) in [
        ("8 KiB of stack copied", stack_kind::COPIED),
        ("frame pointers", stack_kind::FRAME_POINTERS),
        ("no stack", stack_kind::NONE),
    ] {
        let setting = Setting { interval: 1, stack_kind: kind, ..Setting::DEFAULT };
        let (every, allocations) = (load(setting)?, load(Setting { live: false, ..setting })?);
        rows.push((name, every, Vec::new(), allocations, Vec::new()));
    }
    let mut baseline = Baseline::load(object, &Guardian::default())?;
    let mut free = Vec::new();
    for _ in 0..options.rounds {
        bare.push(workload.run(SAMPLED_PAIRS, SIZE)?.cpu_ns as f64 / SAMPLED_PAIRS as f64);
        let mut slice = |workload: &mut Workload, place| -> anyhow::Result<f64> {
            attach(&mut baseline, &allocator, pid, place, false)?;
            let spent = workload.run(PAIRS, SIZE)?;
            baseline.off();
            Ok(spent.cpu_ns as f64 / PAIRS as f64)
        };
        free.push(slice(&mut workload, Where::Everywhere)? - slice(&mut workload, Where::Allocations)?);
        for (_, every, pairs, allocations, mallocs) in &mut rows {
            for (recording, into) in [(every, pairs), (allocations, mallocs)] {
                recording.on()?;
                workload.run(100, SIZE)?;
                into.push(workload.run(SAMPLED_PAIRS, SIZE)?.cpu_ns as f64 / SAMPLED_PAIRS as f64);
                recording.off();
            }
        }
    }
    let bare = median(&bare);
    println!("\n{:<32} {:>14} {:>22}", "sampled (-i 1), ns added", "its allocation", "allocation, live map and free");
    for (name, _, pairs, _, mallocs) in &rows {
        println!("{name:<32} {:>14.0} {:>22.0}", median(mallocs) - bare, median(pairs) - bare);
    }
    println!("{:<32} {:>14} {:>22.0}", "of these, the free's own trap", "", median(&free));
    Ok(())
}

/// Which probed instructions the baseline is put on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Where {
    /// All of them.
    Everywhere,
    /// Entries of allocating functions.
    Allocations,
    /// Entries and returns of allocating functions.
    AllocationsAndReturns,
}

/// Attaches the baseline to an allocator: with multi links if the kernel has them, unless `perf` is set.
pub fn attach(
    baseline: &mut Baseline,
    allocator: &Allocator,
    pid: u32,
    place: Where,
    perf: bool,
) -> std::io::Result<()> {
    let sites = allocator.sites.iter().filter(|(_, frees, _, _)| place == Where::Everywhere || !frees);
    let offsets: Vec<u64> = sites.map(|(offset, ..)| *offset).collect();
    let returns: &[bool] = if place == Where::AllocationsAndReturns { &[false, true] } else { &[false] };
    returns.iter().try_for_each(|on_return| baseline.link((&allocator.path, &offsets), pid, *on_return, perf))
}
