//! Measures the CPU time of finding out which parts of sampled blocks are in memory, for as many blocks as a profile looks
//! up: one that is refreshed again and again, and a file.

use std::time::Duration;

use anyhow::Context as _;
use heapbpf_bench::quantiles::spread;
use heapbpf_host::clock::thread_cpu_time;
use heapbpf_host::in_memory;

/// As in `crates/record/src/session/snapshots.rs`.
const BLOCKS: [usize; 2] = [4096, 32_768];
const HEAP_BYTES: usize = 512 << 20;
const PAGE_BYTES: usize = 4096;
const ROUNDS: usize = 21;

fn main() -> anyhow::Result<()> {
    let mut heap = vec![0_u8; HEAP_BYTES];
    // Every other page is in memory, so that as many ranges as possible are listed.
    heap.chunks_mut(2 * PAGE_BYTES).for_each(|pages| pages[0] = 1);
    let start = heap.as_ptr().addr() as u64;
    for blocks in BLOCKS {
        let step = (HEAP_BYTES / blocks) as u64;
        let ranges: Vec<_> = (0..blocks as u64).map(|at| start + at * step..start + at * step + step / 2).collect();
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            let begun = thread_cpu_time();
            let found = in_memory::of(std::process::id(), &ranges, Duration::from_secs(60));
            found.context("the page map cannot be read")?;
            times.push((thread_cpu_time() - begun).as_secs_f64() * 1e3);
        }
        let times = spread(&times);
        println!(
            "residency of {blocks} sampled blocks, in a heap of 512 MiB: {times} ms a profile (wanted: at most 50)"
        );
    }
    Ok(())
}
