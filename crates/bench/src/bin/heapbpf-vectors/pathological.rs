//! Known answers on sequences that break naive samplers, by formula and by simulation (seeded).

use serde_json::Value;

use heapbpf_statistics::weight::inclusion;
use sampler_ebpf::constants::draw_constants;
use sampler_ebpf::countdown::step;
use sampler_ebpf::geometric::draw;
use sampler_ebpf::rng;

use crate::check::{Checker, count, pairs, rows};

/// Number of simulated cycles, and the tolerance of their totals in standard errors (exceeded by chance in one of
/// 150,000 checks).
const CYCLES: u64 = 100_000;
const SIGMAS: f64 = 4.5;

pub fn pathological(file: &Value, checker: &mut Checker) {
    for sequence in rows(file, "sequences") {
        formulas(sequence, checker);
        simulation(sequence, checker);
    }
}

fn formulas(sequence: &Value, checker: &mut Checker) {
    let name = sequence["name"].as_str().unwrap_or_default();
    let (r, cycle) = (count(sequence, "interval"), pairs(&sequence["cycle"]));
    let bytes: u64 = cycle.iter().map(|(size, times)| size * times).sum();
    let calls: u64 = cycle.iter().map(|(_, times)| times).sum();
    checker.equal(&format!("{name}: bytes of a cycle"), bytes, &sequence["cycle_bytes"]);
    let records: f64 = cycle.iter().map(|&(size, times)| times as f64 * probability(size, r)).sum();
    for class in rows(sequence, "classes") {
        let (size, times) = (count(class, "size"), count(class, "per_cycle"));
        let Some(found) = inclusion(size, r) else {
            checker.fail(&format!("{name}: {size} bytes cannot be sampled"));
            continue;
        };
        let (n, k, interval) = (size as f64, times as f64, r as f64);
        for (key, actual) in [
            ("bytes_per_cycle", n * k),
            ("true_byte_share", n * k / bytes as f64),
            ("true_count_share", k / calls as f64),
            ("p_sample", found.probability),
            ("expected_samples_per_cycle", k * found.probability),
            ("byte_weight", n * found.weight),
            ("count_weight", found.weight),
            ("expected_multi_draws_per_cycle", n * k / interval),
            ("naive_one_record_times_R_share", k * found.probability / records),
            ("min_size_over_R_prob", (n / interval).min(1.0)),
            ("rel_sd_per_1e6_cycles", (found.true_variance(1.0) / (1e6 * k)).sqrt()),
        ] {
            checker.close(&format!("{name}: {key} of {size}"), actual, &class[key], 1e-9);
        }
        let always = (size >= r).then_some(1.0);
        checker.close_or_null(&format!("{name}: large_always_p of {size}"), always, &class["large_always_p"], 1e-9);
    }
}

fn probability(size: u64, r: u64) -> f64 {
    inclusion(size, r).map_or(0.0, |inclusion| inclusion.probability)
}

/// Runs the real sampler on the sequence: the bytes of each class must be within the stated error.
fn simulation(sequence: &Value, checker: &mut Checker) {
    let name = sequence["name"].as_str().unwrap_or_default();
    let (r, cycle) = (count(sequence, "interval"), pairs(&sequence["cycle"]));
    let Some(constants) = draw_constants(r) else {
        return checker.fail(&format!("{name}: no constants for R {r}"));
    };
    let mut state = rng::seed(1, r);
    let mut remaining = draw(rng::next(&mut state), &constants);
    let mut samples = vec![0u64; cycle.len()];
    for _ in 0..CYCLES {
        for (class, &(size, times)) in cycle.iter().enumerate() {
            for _ in 0..times {
                if step(&mut remaining, size).is_some() {
                    samples[class] += 1;
                    remaining = draw(rng::next(&mut state), &constants);
                }
            }
        }
    }
    for (&(size, times), &samples) in cycle.iter().zip(&samples) {
        let Some(found) = inclusion(size, r) else { continue };
        let relative = samples as f64 * found.weight / (CYCLES * times) as f64 - 1.0;
        let error = (found.true_variance(1.0) / (CYCLES * times) as f64).sqrt();
        checker.holds(
            &format!("{name}: simulated bytes of {size} are off by {relative:e}, standard error {error:e}"),
            relative.abs() <= SIGMAS * error + 1e-9,
        );
    }
}
