//! Measures the time to compute weights, intervals and p-values of 100,000 stacks, in one thread. All random numbers are
//! seeded.

use std::hint::black_box;
use std::time::Duration;

use heapbpf_statistics::Criterion;
use heapbpf_statistics::estimate::{self, Part};
use heapbpf_statistics::growth::{Observed, p_no_growth, q_values};
use heapbpf_statistics::interval::Sampled;
use heapbpf_statistics::sums::SampleSums;
use sampler_ebpf::rng;

const STACKS: usize = 100_000;
const INTERVAL: u64 = 524_288;

/// Sizes of a stack's samples, from bytes to several R: 1 to 1,000 samples, with few stacks that have many.
fn samples(state: &mut u64) -> Vec<u64> {
    let count = uniform(state).powf(-0.8).min(1_000.0) as usize;
    (0..count).map(|_| (2f64.powf(4.0 + 18.0 * uniform(state))) as u64).collect()
}

fn main() {
    let mut state = rng::seed(1, 0);
    let sizes: [Vec<Vec<u64>>; 2] = std::array::from_fn(|_| (0..STACKS).map(|_| samples(&mut state)).collect());
    let count: usize = sizes.iter().flatten().map(Vec::len).sum();
    for round in 1..=3 {
        let start = cpu_time();
        let sums: [Vec<SampleSums>; 2] = sizes.each_ref().map(|stacks| {
            stacks
                .iter()
                .map(|sizes| {
                    let mut sums = SampleSums::default();
                    sizes.iter().for_each(|&size| sums.record(size, size, 0, INTERVAL));
                    sums
                })
                .collect()
        });
        let weighted = cpu_time() - start;
        for sums in &sums[1] {
            black_box(estimate::bytes(&[Part::new(INTERVAL, sums)], Criterion::Bytes, 0.95));
            black_box(estimate::objects(&[Part::new(INTERVAL, sums)], Criterion::Bytes, 0.95));
        }
        let with_intervals = cpu_time() - start;
        let p: Vec<f64> = sums[0].iter().zip(&sums[1]).map(|(a, b)| p_no_growth(&observed(a), &observed(b))).collect();
        black_box(q_values(&p));
        let all = cpu_time() - start;
        println!(
            "round {round}, CPU time: {STACKS} stacks, {count} samples: weights {:.0} ms, intervals {:.0} ms, p- and q-values {:.0} ms, \
             all {:.0} ms",
            weighted.as_secs_f64() * 1e3,
            (with_intervals - weighted).as_secs_f64() * 1e3,
            (all - with_intervals).as_secs_f64() * 1e3,
            all.as_secs_f64() * 1e3,
        );
    }
}

fn observed(sums: &SampleSums) -> Observed {
    let sampled = Sampled { samples: sums.samples, sum: sums.sampled_bytes as f64, estimate: sums.bytes };
    Observed { sampled, interval: INTERVAL, exposure: 1.0 }
}

/// CPU time of this thread, which excludes waiting on a busy machine; to a clock tick (1 to 10 ms).
fn cpu_time() -> Duration {
    let nanoseconds = std::fs::read_to_string("/proc/thread-self/schedstat")
        .ok()
        .and_then(|text| text.split_whitespace().next()?.parse().ok());
    Duration::from_nanos(nanoseconds.unwrap_or_default())
}

/// A uniform number in (0, 1].
fn uniform(state: &mut u64) -> f64 {
    ((rng::next(state) >> 11) as f64 + 1.0) / 2f64.powi(53)
}
