//! Cost per pair against the number of threads, of live samples, and the sampling interval.

use sampler_ebpf::abi::stack_kind;
use sampler_user::cost::cpus::pin;
use sampler_user::cost::trial::{Allocator, Floor, Recording, STACK_BYTES, Setting, Where};
use sampler_user::cost::workload::Workload;
use sampler_user::profile::model::Criterion;

use super::Options;
use super::pinned::Library;
use super::ratios::{median, spread};

const PAIRS: u64 = 40_000;
/// Blocks allocated at a time while all are sampled: their records fit the ring.
const HELD: u64 = 40_000;
const PLAIN: Setting = Setting {
    interval: 512 << 10,
    criterion: Criterion::Bytes,
    live: true,
    link: None,
    stack_kind: stack_kind::COPIED,
    stack_bytes: STACK_BYTES,
};

/// Measures and prints.
pub fn run(options: &Options, object: &[u8], library: &Library) -> anyhow::Result<()> {
    println!("{:<32} {:>9}            of the floor [quartiles]", "512 KiB, CPU time per pair", "ns");
    for threads in [1_u64, 2, 4, 8, 16] {
        let mut workload = library.start(&options.pairs, &[&threads.to_string()])?;
        if threads > 1 {
            pin(workload.pid(), |_| true);
        }
        let row = against_floor(&mut workload, object, PLAIN, options, threads, |_, _| Ok(()))?;
        println!("{:<32} {row}", format!("{threads} threads"));
    }
    for live in [0_u64, 1_000, 10_000, 100_000, 1_000_000] {
        let mut workload = library.start(&options.pairs, &["1"])?;
        let setting = Setting { interval: 1, stack_kind: stack_kind::NONE, ..PLAIN };
        let hold = |workload: &mut Workload, recording: &mut Recording| {
            for _ in 0..live.div_ceil(HELD) {
                workload.hold(HELD.min(live), 64)?;
                recording.drain();
            }
            recording.set_interval(PLAIN.interval)
        };
        let row = against_floor(&mut workload, object, setting, options, 1, hold)?;
        println!("{:<32} {row}", format!("{live} live samples"));
    }
    for exponent in 0..=7 {
        let interval = 10_u64.pow(exponent);
        let mut workload = library.start(&options.pairs, &["1"])?;
        let row = against_floor(&mut workload, object, Setting { interval, ..PLAIN }, options, 1, |_, _| Ok(()))?;
        println!("{:<32} {row}", format!("R = {interval} bytes"));
    }
    Ok(())
}

/// heapbpf after `prepare`, against the floor put on just before and after: one line of the table.
fn against_floor(
    workload: &mut Workload,
    object: &[u8],
    setting: Setting,
    options: &Options,
    threads: u64,
    prepare: impl Fn(&mut Workload, &mut Recording) -> anyhow::Result<()>,
) -> anyhow::Result<String> {
    let pid = workload.pid();
    let allocator = Allocator::of_process(pid)?;
    let mut recording = Recording::load(object, setting, &allocator, pid)?;
    let mut floor = Floor::load(object)?;
    let pairs = if setting.interval < 100 { PAIRS / 8 } else { PAIRS };
    recording.on()?;
    prepare(workload, &mut recording)?;
    recording.off();
    let slice = |workload: &mut Workload, pairs: u64| -> anyhow::Result<f64> {
        let each = (pairs / threads).max(1);
        workload.run(100, options.size)?;
        Ok(workload.run(each, options.size)?.cpu_ns as f64 / (each * threads) as f64)
    };
    let (mut ns, mut to_floor) = (Vec::new(), Vec::new());
    for _ in 0..options.rounds.div_ceil(2) {
        let mut at_floor = |workload: &mut Workload| -> anyhow::Result<f64> {
            floor.on(&allocator, pid, Where::Everywhere, false)?;
            let spent = slice(workload, PAIRS)?;
            floor.off();
            Ok(spent)
        };
        let before = at_floor(workload)?;
        recording.on()?;
        let spent = slice(workload, pairs)?;
        recording.off();
        let after = at_floor(workload)?;
        ns.push(spent);
        to_floor.push(spent / (0.5 * (before + after)));
    }
    Ok(format!("{:>9.1}            {}", median(&ns), spread(&to_floor)))
}
