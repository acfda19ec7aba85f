//! Measures the daemon's memory per tracked live sample, the time to add and to remove one, and its memory when there
//! are more distinct stacks than it keeps.

use std::sync::Arc;
use std::time::Instant;

use heapbpf_heap::live::Heap;
use heapbpf_heap::sample::{Sample, SampleKey};
use heapbpf_host::own_memory::give_memory_back;
use heapbpf_unwind::raw::{Completeness, RawFrame, RawStack, UnwinderKind};
use sampler_ebpf::abi::ProcessKey;

/// Distinct stacks.
const STACKS: u64 = 10_000;
/// Distinct stacks of a program that never allocates twice in the same place, and their depth.
const MANY_STACKS: u64 = 1_000_000;
const FRAMES: u64 = 30;

fn resident_bytes() -> anyhow::Result<u64> {
    let process = procfs::process::Process::myself()?;
    Ok(process.statm()?.resident * procfs::page_size())
}

/// A stack without frames; the memory of stacks is measured separately.
fn stack() -> RawStack {
    RawStack { frames: Box::default(), unwinder: UnwinderKind::Dwarf, completeness: Completeness::Complete }
}

fn deep_stack(number: u64) -> RawStack {
    let frame = |depth| RawFrame { address: 0x40_0000 + number * FRAMES + depth, module: None, file_offset: 0 };
    RawStack { frames: (0..FRAMES).map(frame).collect(), ..stack() }
}

/// An allocation of 64 bytes at R = 4096.
fn sample(id: u64, process: ProcessKey, thread: &Arc<str>, stack: Arc<RawStack>) -> Sample {
    Sample {
        id,
        key: SampleKey { process, thread: Arc::clone(thread), function: 0, interval: 4096, stack: stack.into() },
        space: process,
        time_ns: id,
        address: 0x5555_0000_0000 + 64 * id,
        size_bytes: 64,
        trials: 64,
        offset: id % 64,
        tracked: true,
        mapped: false,
    }
}

/// Measures the memory of very many stacks, by the limit on distinct stacks.
fn many_stacks(process: ProcessKey, thread: &Arc<str>) -> anyhow::Result<()> {
    for most in [10_000, 50_000, 200_000, usize::MAX] {
        let before = resident_bytes()?;
        let mut heap = Heap::default().with_row_limit(most);
        let start = Instant::now();
        for id in 0..MANY_STACKS {
            heap.allocate(sample(id, process, thread, Arc::new(deep_stack(id))));
            heap.free(process, id, id, false);
        }
        let elapsed = start.elapsed();
        println!(
            "{MANY_STACKS} stacks of {FRAMES} frames, {} told apart: {:>7.1} MiB, {:>5.0} ns each, {} put together",
            if most == usize::MAX { "all".into() } else { format!("at most {most}") },
            resident_bytes()?.saturating_sub(before) as f64 / 1_048_576.0,
            elapsed.as_nanos() as f64 / MANY_STACKS as f64,
            heap.merged_rows(),
        );
        drop(heap);
        give_memory_back();
    }
    Ok(())
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
            let stack = Arc::clone(&stacks[(id % STACKS) as usize]);
            heap.allocate(sample(id, process, &thread, stack));
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
    many_stacks(process, &thread)
}
