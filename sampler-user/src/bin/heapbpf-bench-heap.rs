//! Measures the daemon's memory per tracked live sample, and the time to take one in and let it go.

use std::sync::Arc;
use std::time::Instant;

use sampler_ebpf::abi::ProcessKey;
use sampler_user::heap::live::{Heap, Sample};
use sampler_user::unwind::raw::{Completeness, RawStack, UnwinderKind};

/// Distinct stacks.
const STACKS: u64 = 10_000;

fn resident_bytes() -> anyhow::Result<u64> {
    let process = procfs::process::Process::myself()?;
    Ok(process.statm()?.resident * procfs::page_size())
}

/// A stack without frames: stacks are counted apart.
fn stack() -> RawStack {
    RawStack { frames: Box::default(), unwinder: UnwinderKind::Dwarf, completeness: Completeness::Complete }
}

fn main() -> anyhow::Result<()> {
    let process = ProcessKey { start_ns: 1, tgid: 1, exec_id: 1 };
    let stacks: Vec<Arc<RawStack>> = (0..STACKS).map(|_| Arc::new(stack())).collect();
    let thread: Arc<str> = "main".into();
    for samples in [1_000_u64, 10_000, 100_000, 1_000_000] {
        let before = resident_bytes()?;
        let mut heap = Heap::default();
        let start = Instant::now();
        for id in 0..samples {
            heap.allocate(Sample {
                id,
                process,
                space: process,
                time_ns: id,
                address: 0x5555_0000_0000 + 64 * id,
                size_bytes: 64,
                trials: 64,
                offset: id % 64,
                interval: 4096,
                thread: Arc::clone(&thread),
                function: 0,
                stack: Arc::clone(&stacks[(id % STACKS) as usize]),
                tracked: true,
                mapped: false,
            });
        }
        let allocated = start.elapsed();
        let bytes = resident_bytes()?.saturating_sub(before);
        let start = Instant::now();
        for id in 0..samples {
            heap.free(process, id, 2 * samples, false);
        }
        println!(
            "{samples:>9} live samples: {:>7.1} MiB, {:>5.0} ns to take one in, {:>5.0} ns to let it go",
            bytes as f64 / 1_048_576.0,
            allocated.as_nanos() as f64 / samples as f64,
            start.elapsed().as_nanos() as f64 / samples as f64,
        );
    }
    Ok(())
}
