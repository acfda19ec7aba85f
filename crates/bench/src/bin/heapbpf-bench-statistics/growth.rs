//! Error rate and power of the growth test: how often it reports growth where there is none, and how often it finds
//! growth.

use heapbpf_statistics::binomial;
use heapbpf_statistics::growth::{Observed, p_no_growth, q_values};
use heapbpf_statistics::interval::Sampled;
use heapbpf_statistics::weight::{Inclusion, inclusion};
use sampler_ebpf::rng;

use crate::uniform;

const INTERVAL: u64 = 524_288;
const RUNS: u32 = 600;
const STACKS: usize = 300;
const LEVEL: f64 = 0.05;

pub fn run() {
    for (name, grown, factor) in
        [("nothing grew", 0, 1.0), ("30 of 300 grew threefold", 30, 3.0), ("one grew fourfold", 1, 4.0)]
    {
        let (discoveries, false_rate, power) = families(grown, factor);
        println!(
            "{name}: {RUNS} pairs of profiles with {STACKS} stacks of 0.1 to 100 expected samples, q <= {LEVEL}: false discovery \
             rate {false_rate:.4}, power {power:.3}, discoveries a pair {discoveries:.2}"
        );
    }
    let cases = [(10.0, 2.0), (30.0, 2.0), (5.0, 4.0), (10.0, 4.0), (50.0, 1.5)];
    for (mean, factor) in cases {
        let size = stack(16.0);
        let mut state = rng::seed(21, mean as u64);
        let found = (0..20_000)
            .filter(|_| p_no_growth(&size.observe(mean, &mut state), &size.observe(mean * factor, &mut state)) <= LEVEL)
            .count();
        println!(
            "one stack of 16 B with {mean} expected samples, x{factor}: found at p <= {LEVEL} in {:.3}",
            found as f64 / 20_000.0
        );
    }
    worst_false_alarms();
}

/// A stack with allocations of one size.
struct Size {
    bytes: f64,
    inclusion: Option<Inclusion>,
}

fn stack(bytes: f64) -> Size {
    let bytes = bytes.round().max(1.0);
    Size { bytes, inclusion: inclusion(bytes as u64, INTERVAL) }
}

impl Size {
    /// Samples of as many allocations as give `mean` expected samples.
    fn observe(&self, mean: f64, state: &mut u64) -> Observed {
        let mut sampled = Sampled::default();
        if let Some(inclusion) = self.inclusion {
            let count = (mean / inclusion.probability + uniform(state)).floor() as u64;
            sampled.samples = binomial::draw(count, inclusion.probability, || rng::next(state));
            sampled.sum = sampled.samples as f64 * self.bytes;
            sampled.estimate = sampled.sum * inclusion.weight;
        }
        Observed { sampled, interval: INTERVAL, exposure: 1.0 }
    }
}

/// Discoveries per pair of profiles, the share of false ones among them (0 if there are none), and the share of grown
/// stacks found.
fn families(grown: usize, factor: f64) -> (f64, f64, f64) {
    let mut state = rng::seed(20, grown as u64);
    let (mut discoveries, mut false_share, mut found) = (0.0, 0.0, 0.0);
    for _ in 0..RUNS {
        let p: Vec<f64> = (0..STACKS)
            .filter_map(|index| {
                let size = stack(INTERVAL as f64 * 10f64.powf(-4.5 + 5.0 * uniform(&mut state)));
                let mean = 10f64.powf(-1.0 + 3.0 * uniform(&mut state));
                let after = if index < grown { mean * factor } else { mean };
                let pair = (size.observe(mean, &mut state), size.observe(after, &mut state));
                // A stack without samples in either profile is left out, unless it grew: the first `grown` values stay
                // those that grew.
                let seen = pair.0.sampled.samples + pair.1.sampled.samples > 0;
                (seen || index < grown).then(|| p_no_growth(&pair.0, &pair.1))
            })
            .collect();
        let q = q_values(&p);
        let wrong = q[grown..].iter().filter(|q| **q <= LEVEL).count() as f64;
        let right = q[..grown].iter().filter(|q| **q <= LEVEL).count() as f64;
        discoveries += wrong + right;
        found += right;
        if wrong > 0.0 {
            false_share += wrong / (wrong + right);
        }
    }
    let runs = f64::from(RUNS);
    (discoveries / runs, false_share / runs, found / (runs * grown.max(1) as f64))
}

/// The largest share of p <= level for one stack that did not grow, over sizes before and after and numbers of samples.
/// Half as many allocations of twice the size are no growth either.
fn worst_false_alarms() {
    let runs = 6_000;
    let factors = [3e-5, 0.1, 0.5, 1.0, 2.0, 5.0];
    let (mut worst, mut sum, mut cells, mut place) = (0.0f64, 0.0, 0.0, String::new());
    for before in factors {
        for after in factors {
            for bytes in [1.0, 3.0, 10.0, 30.0, 100.0] {
                let r = INTERVAL as f64;
                // Equal bytes in both, so that the numbers of allocations differ. There are enough bytes for whole
                // numbers.
                if bytes < 3.0 * f64::max(before, after) {
                    continue;
                }
                let (one, two) = (stack(before * r), stack(after * r));
                let mean = |size: &Size| size.inclusion.map_or(0.0, |i| bytes * r / size.bytes * i.probability);
                let mut state = rng::seed(22, cells as u64);
                let alarms = (0..runs)
                    .filter(|_| {
                        p_no_growth(&one.observe(mean(&one), &mut state), &two.observe(mean(&two), &mut state)) <= LEVEL
                    })
                    .count();
                let share = alarms as f64 / f64::from(runs);
                sum += share;
                cells += 1.0;
                if share > worst {
                    (worst, place) = (share, format!("{before} R to {after} R, {bytes} R bytes"));
                }
            }
        }
    }
    println!(
        "false alarms at p <= {LEVEL} over {cells} cells of {runs} pairs: worst {worst:.3} ({place}), mean {:.3}",
        sum / cells
    );
}
