//! The programs in the kernel, put on and off in interleaved rounds: no daemon, only what the target itself pays.

use sampler_ebpf::abi::stack_kind;
use sampler_user::cost::quantiles::{median, spread};
use sampler_user::cost::trial::{Allocator, Floor, Recording, Setting, Where};
use sampler_user::cost::workload::Workload;
use sampler_user::kernel::object::aligned;
use sampler_user::kernel::programs::LinkKind;

use super::Options;
use super::pinned::Library;

/// Pairs of one slice, at about a microsecond each.
const PAIRS: u64 = 40_000;
/// Pairs of one slice with other work between the calls, at some three microseconds each.
const COLD_PAIRS: u64 = 20_000;
/// Pairs of one slice if each is sampled: the rings have room for them.
const SAMPLED_PAIRS: u64 = 6_000;
/// Calls below main at which the copied stack has about 8 KiB.
const DEPTH: &str = "40";

enum What {
    Bare,
    Floor(Where, bool),
    Heapbpf(Box<Recording>),
}

struct Condition {
    name: String,
    what: What,
    pairs: u64,
    ns: Vec<f64>,
    /// The mean of the floors just before and after each slice.
    floors: Vec<f64>,
    records: usize,
}

impl Condition {
    fn new(name: impl Into<String>, pairs: u64, what: What) -> Self {
        Self { name: name.into(), what, pairs, ns: Vec::new(), floors: Vec::new(), records: 0 }
    }

    /// What was measured so far.
    fn forget(&mut self) {
        self.ns.clear();
        self.floors.clear();
        self.records = 0;
    }
}

struct Bench {
    workload: Workload,
    allocator: Allocator,
    floor: Floor,
    size: u64,
    /// With other work between the calls.
    cold: bool,
}

impl Bench {
    /// Nanoseconds of CPU time per pair of one slice.
    fn slice(&mut self, what: &mut What, pairs: u64) -> anyhow::Result<(f64, usize)> {
        let pid = self.workload.pid();
        match what {
            What::Bare => {}
            What::Floor(place, perf) => self.floor.on(&self.allocator, pid, *place, *perf)?,
            What::Heapbpf(recording) => recording.on()?,
        }
        // The first calls after a change find cold caches, and new threads' state.
        let (workload, size) = (&mut self.workload, self.size);
        let mut run = |pairs| if self.cold { workload.run_cold(pairs, size) } else { workload.run(pairs, size) };
        run(200)?;
        let spent = run(pairs)?;
        let mut records = 0;
        match what {
            What::Bare => {}
            What::Floor(..) => self.floor.off(),
            What::Heapbpf(recording) => records = recording.off(),
        }
        Ok((spent.cpu_ns as f64 / pairs as f64, records))
    }
}

/// Measures and prints.
pub fn run(options: &Options, object: &'static [u8], library: &Library) -> anyhow::Result<()> {
    let workload = library.start(&options.pairs, &["1"])?;
    let pid = workload.pid();
    let allocator = Allocator::of_process(pid)?;
    let plain = Setting::DEFAULT;
    let heapbpf = |object: &[u8], setting: Setting| -> anyhow::Result<What> {
        Ok(What::Heapbpf(Box::new(Recording::load(object, setting, &allocator, pid)?)))
    };
    let mut conditions = vec![
        Condition::new("bare", 50 * PAIRS, What::Bare),
        Condition::new("no-op at malloc and free", PAIRS, What::Floor(Where::Everywhere, false)),
        Condition::new("no-op at malloc", PAIRS, What::Floor(Where::Allocations, false)),
        Condition::new("512 KiB", PAIRS, heapbpf(object, plain)?),
        Condition::new("512 KiB --no-live", PAIRS, heapbpf(object, Setting { live: false, ..plain })?),
    ];
    for path in &options.object {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let bytes = aligned(&std::fs::read(path)?);
        conditions.push(Condition::new(format!("{name}: 512 KiB"), PAIRS, heapbpf(bytes, plain)?));
        let no_live = heapbpf(bytes, Setting { live: false, ..plain })?;
        conditions.push(Condition::new(format!("{name}: --no-live"), PAIRS, no_live));
    }
    if options.object.is_empty() {
        for (name, interval, pairs) in [("-i 0", 0, PAIRS), ("4 KiB", 4096, PAIRS), ("-i 1", 1, SAMPLED_PAIRS)] {
            conditions.push(Condition::new(name, pairs, heapbpf(object, Setting { interval, ..plain })?));
        }
        let every = Setting { interval: 1, live: false, ..plain };
        conditions.push(Condition::new("-i 1 --no-live", SAMPLED_PAIRS, heapbpf(object, every)?));
        for (name, link) in [("--link multi", LinkKind::Multi), ("--link perf", LinkKind::Perf)] {
            conditions.push(Condition::new(name, PAIRS, heapbpf(object, Setting { link: Some(link), ..plain })?));
        }
        let returns = What::Floor(Where::AllocationsAndReturns, false);
        conditions.push(Condition::new("no-op at malloc and its return", PAIRS, returns));
        conditions.push(Condition::new("no-op at both, perf links", PAIRS, What::Floor(Where::Everywhere, true)));
    }
    println!(
        "{}: malloc {}, free {}\n",
        allocator.name(),
        allocator.kind("malloc").unwrap_or("?"),
        allocator.kind("free").unwrap_or("?")
    );
    let floor = Floor::load(object)?;
    let mut bench = Bench { workload, allocator, floor, size: options.size, cold: false };
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
    let mut floor = What::Floor(Where::Everywhere, false);
    for round in 0..=rounds {
        let mut before = bench.slice(&mut floor, pairs)?.0;
        for condition in conditions.iter_mut() {
            let (ns, records) = bench.slice(&mut condition.what, condition.pairs.min(pairs))?;
            let after = bench.slice(&mut floor, pairs)?.0;
            // The first round warms up.
            if round > 0 {
                condition.ns.push(ns);
                condition.floors.push(0.5 * (before + after));
                condition.records += records;
            }
            before = after;
        }
    }
    Ok(())
}

/// `own`: what the workload takes without probes, if only what they add is compared.
fn print(title: &str, conditions: &[Condition], own: f64) {
    let bare = median(&conditions[0].ns);
    println!("{title:<48} {:>9} {:>9}  of the floor [quartiles]   records per pair", "ns", "added");
    for condition in conditions {
        let ns = median(&condition.ns);
        let rounds = condition.ns.len() as u64;
        let to_floor: Vec<f64> =
            condition.ns.iter().zip(&condition.floors).map(|(ns, floor)| (ns - own) / (floor - own)).collect();
        println!(
            "{:<48} {ns:>9.1} {:>9.1}  {:<25} {:>8.4}",
            condition.name,
            ns - bare,
            spread(&to_floor),
            condition.records as f64 / (condition.pairs * rounds).max(1) as f64,
        );
    }
    println!();
}

/// A sampled allocation with everything: both traps, 8 KiB of stack, records, the live map.
fn sampled(options: &Options, object: &[u8], library: &Library) -> anyhow::Result<()> {
    let mut workload = library.start(&options.pairs, &["1", DEPTH])?;
    let allocator = Allocator::of_process(workload.pid())?;
    let mut bare = Vec::new();
    let mut rows = Vec::new();
    for (name, kind) in [
        ("8 KiB of stack copied", stack_kind::COPIED),
        ("frame pointers", stack_kind::FRAME_POINTERS),
        ("no stack", stack_kind::NONE),
    ] {
        let setting = Setting { interval: 1, stack_kind: kind, ..Setting::DEFAULT };
        let every = Recording::load(object, setting, &allocator, workload.pid())?;
        let allocations = Recording::load(object, Setting { live: false, ..setting }, &allocator, workload.pid())?;
        rows.push((name, every, Vec::new(), allocations, Vec::new()));
    }
    let pid = workload.pid();
    let mut floor = Floor::load(object)?;
    let mut free = Vec::new();
    for _ in 0..options.rounds {
        bare.push(workload.run(SAMPLED_PAIRS, options.size)?.cpu_ns as f64 / SAMPLED_PAIRS as f64);
        let mut slice = |workload: &mut Workload, place| -> anyhow::Result<f64> {
            floor.on(&allocator, pid, place, false)?;
            let spent = workload.run(PAIRS, options.size)?;
            floor.off();
            Ok(spent.cpu_ns as f64 / PAIRS as f64)
        };
        free.push(slice(&mut workload, Where::Everywhere)? - slice(&mut workload, Where::Allocations)?);
        for (_, every, pairs, allocations, mallocs) in &mut rows {
            for (recording, into) in [(every, pairs), (allocations, mallocs)] {
                recording.on()?;
                workload.run(100, options.size)?;
                into.push(workload.run(SAMPLED_PAIRS, options.size)?.cpu_ns as f64 / SAMPLED_PAIRS as f64);
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
