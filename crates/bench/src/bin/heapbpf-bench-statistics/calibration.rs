//! The benefit of exact totals: mean square error of calibrated estimates relative to raw ones, by regression and by
//! ratio.

use heapbpf_statistics::binomial;
use heapbpf_statistics::calibrate::{Estimated, by_regression};
use heapbpf_statistics::weight::{Inclusion, inclusion};
use sampler_ebpf::rng;

const INTERVAL: u64 = 524_288;
const RUNS: u32 = 40_000;

/// A stack with allocations of one size.
struct Stack {
    size: f64,
    count: u64,
    inclusion: Inclusion,
}

/// Stacks by size and total, both in units of R.
fn stacks(given: &[(f64, f64)]) -> Vec<Stack> {
    let r = INTERVAL as f64;
    let stack = |&(size, bytes): &(f64, f64)| {
        let size = (size * r).max(16.0).round();
        let count = ((bytes * r / size).round() as u64).max(1);
        Some(Stack { size, count, inclusion: inclusion(size as u64, INTERVAL)? })
    };
    given.iter().filter_map(stack).collect()
}

pub fn run() {
    let equal: Vec<(f64, f64)> = (0..40).map(|_| (0.0, 5.0)).collect();
    let cases: [(&str, &[(f64, f64)]); 5] = [
        ("16 B, shares 60/30/8/2 %, 200 samples", &[(0.0, 120.0), (0.0, 60.0), (0.0, 16.0), (0.0, 4.0)]),
        ("16 B, shares 60/30/8/2 %, 20 samples", &[(0.0, 12.0), (0.0, 6.0), (0.0, 1.6), (0.0, 0.4)]),
        ("8 of 8 R (62 %), 16 B 29/10 %", &[(8.0, 64.0), (0.0, 29.7), (0.0, 10.3)]),
        ("2 R 40 %, 0.2 R 40 %, 16 B 20 %", &[(2.0, 40.0), (0.2, 40.0), (0.0, 20.0)]),
        ("40 equal stacks of 16 B", &equal),
    ];
    println!("MSE relative to raw estimates, {RUNS} runs (first stacks; theory for regression is 1 - V_g/V_all):");
    for (name, given) in cases {
        let stacks = stacks(given);
        let (raw, regression, ratio) = errors(&stacks);
        let shown = stacks.len().min(4);
        let relative =
            |errors: &[f64]| (0..shown).map(|i| format!("{:.3}", errors[i] / raw[i])).collect::<Vec<_>>().join(" ");
        let all: f64 = stacks.iter().map(true_variance).sum();
        let theory = stacks[..shown].iter().map(|s| format!("{:.3}", 1.0 - true_variance(s) / all)).collect::<Vec<_>>();
        println!(
            "{name}: regression {} (theory {}), ratio {}",
            relative(&regression),
            theory.join(" "),
            relative(&ratio)
        );
    }
}

fn true_variance(stack: &Stack) -> f64 {
    stack.count as f64 * stack.inclusion.true_variance(stack.size)
}

/// Mean square errors of raw, regression and ratio estimates.
fn errors(stacks: &[Stack]) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let mut state = rng::seed(12, stacks.len() as u64);
    let truth: Vec<f64> = stacks.iter().map(|stack| stack.size * stack.count as f64).collect();
    let exact: f64 = truth.iter().sum();
    let mut errors = [vec![0.0; stacks.len()], vec![0.0; stacks.len()], vec![0.0; stacks.len()]];
    for _ in 0..RUNS {
        let estimated: Vec<Estimated> = stacks
            .iter()
            .map(|stack| {
                let samples = binomial::draw(stack.count, stack.inclusion.probability, || rng::next(&mut state)) as f64;
                Estimated {
                    estimate: samples * stack.size * stack.inclusion.weight,
                    variance: samples * stack.inclusion.estimated_variance(stack.size),
                }
            })
            .collect();
        let total: f64 = estimated.iter().map(|stack| stack.estimate).sum();
        let regression = by_regression(&estimated, exact);
        for (i, truth) in truth.iter().enumerate() {
            let raw = estimated[i].estimate;
            let ratio = if total > 0.0 { raw * exact / total } else { raw };
            for (errors, estimate) in errors.iter_mut().zip([raw, regression[i], ratio]) {
                errors[i] += (estimate - truth).powi(2) / f64::from(RUNS);
            }
        }
    }
    let [raw, regression, ratio] = errors;
    (raw, regression, ratio)
}
