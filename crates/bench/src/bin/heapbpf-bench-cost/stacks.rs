//! The cost of copying a stack, by the size of the copy.

use heapbpf_bench::quantiles::{median, quantile};
use heapbpf_heap::event::decode_stack;
use heapbpf_kernel::guardian::Guardian;
use heapbpf_record::cost::trial::{Allocator, Recording, Setting};
use sampler_ebpf::abi::stack_kind;

use super::pinned::Library;
use super::{Options, SIZE};

/// Depths of calls below `main`; each call has a frame of about 170 bytes.
const DEPTHS: [u64; 8] = [2, 10, 22, 44, 90, 185, 370, 1400];
/// Copies in one slice. They must fit the ring, because it is not read during a slice.
const MOST_COPIES: u64 = 800;
/// Size of the ring, bytes.
const RING_BYTES: u64 = 48 << 20;
/// Largest copy, bytes.
const STACK_BYTES: u64 = 256 << 10;

/// Measures and prints the cost. Every allocation is sampled. The same without a stack is measured just before and
/// after.
pub fn run(options: &Options, object: &[u8], library: &Library) -> anyhow::Result<()> {
    println!("\n{:>14} {:>16} {:>22}", "bytes copied", "ns per copy", "[quartiles]");
    for depth in DEPTHS {
        let mut workload = library.start(&options.pairs, &["1", &depth.to_string()])?;
        let pid = workload.pid();
        let allocator = Allocator::of_process(pid)?;
        let load = |stack_kind| {
            let setting =
                Setting { interval: 1, live: false, stack_kind, stack_bytes: STACK_BYTES, ..Setting::DEFAULT };
            Recording::load(object, setting, &allocator, pid, &Guardian::default())
        };
        let (mut copied, mut none) = (load(stack_kind::COPIED)?, load(stack_kind::NONE)?);
        // The size class that a copy of this depth needs.
        let pairs = MOST_COPIES.min(RING_BYTES / (depth * 256).next_power_of_two().max(4096));
        let mut slice = |recording: &mut Recording| -> anyhow::Result<(f64, u64, u64)> {
            recording.on()?;
            workload.run(20, SIZE)?;
            drain(recording);
            let spent = workload.run(pairs, SIZE)?;
            let (copies, bytes) = drain(recording);
            recording.off();
            Ok((spent.cpu_ns as f64 / pairs as f64, copies, bytes))
        };
        let mut added = Vec::new();
        let mut size = 0;
        for round in 0..=options.rounds {
            let before = slice(&mut none)?.0;
            let (ns, copies, bytes) = slice(&mut copied)?;
            let after = slice(&mut none)?.0;
            anyhow::ensure!(copies >= pairs, "{copies} of {pairs} copies fitted in the ring");
            size = bytes / copies;
            // The first round warms up.
            if round > 0 {
                added.push(ns - 0.5 * (before + after));
            }
        }
        println!(
            "{size:>14} {:>16.0} {:>22}",
            median(&added),
            format!("[{:.0}, {:.0}]", quantile(&added, 0.25), quantile(&added, 0.75))
        );
    }
    Ok(())
}

/// Empties the rings. Returns the number of stack copies and their total size in bytes.
fn drain(recording: &mut Recording) -> (u64, u64) {
    while recording.events.drain(|_| ()) > 0 {}
    let (mut copies, mut bytes) = (0, 0);
    loop {
        let count = recording.stacks.drain(|record| {
            if let Some(copied) = decode_stack(&record) {
                copies += 1;
                bytes += u64::from(copied.head.copied_bytes);
            }
        });
        if count == 0 {
            return (copies, bytes);
        }
    }
}
