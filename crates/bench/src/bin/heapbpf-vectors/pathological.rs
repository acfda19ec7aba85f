//! Known answers on sequences that break naive samplers, by formula and by simulation (seeded).

use serde_json::Value;
use statrs::function::exponential;

use heapbpf_statistics::weight::inclusion;
use sampler_ebpf::constants::draw_constants;
use sampler_ebpf::geometric::draw;
use sampler_ebpf::rng;
use sampler_ebpf::sampler::step;

use crate::check::{Checker, count, number, pairs, rows};

/// Number of simulated cycles, and the tolerance of their totals in standard errors (exceeded by chance in one of
/// 150,000 checks).
const CYCLES: u64 = 100_000;
const SIGMAS: f64 = 4.5;

pub fn pathological(file: &Value, checker: &mut Checker) {
    for sequence in rows(file, "sequences") {
        formulas(sequence, checker);
        simulation(sequence, checker);
    }
    naive(&file["naive_algorithms"], checker);
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

/// Runs the naive samplers on the same sequences, and compares with the file's own simulation to 1 % of probability.
fn naive(naive: &Value, checker: &mut Checker) {
    for (name, expected) in naive["simulated"].as_object().into_iter().flatten() {
        let Some((cycle, rule)) = name
            .strip_prefix("99_1_")
            .map(|rule| ([(99, 1), (1, 1)], rule))
            .or_else(|| name.strip_prefix("10000_100_").map(|rule| ([(10_000, 1), (1, 100)], rule)))
        else {
            continue;
        };
        let cycles = rule.strip_suffix("cycles").and_then(|rest| rest.rsplit('_').next()?.parse().ok());
        let rule = match rule {
            "reset" => Rule::Reset,
            "large_always" => Rule::LargeAlways,
            _ if rule.starts_with("carry") => Rule::Carry,
            _ => continue,
        };
        let [first, second] = shares(cycle, rule, cycles.unwrap_or(100_000));
        for (keys, actual) in [(["p99", "p_big"], first), (["p1", "p_small_mean"], second)] {
            let key = keys.into_iter().find(|key| !expected[*key].is_null()).unwrap_or(keys[0]);
            checker.near(&format!("naive {name} {key}"), actual, &expected[key], 0.01);
        }
    }
    for check in rows(naive, "published_checks") {
        let claim = check["claim"].as_str().unwrap_or_default();
        // P(recorded) of an allocation of X if Exp(R) is carried over: 1 − Y + X/R · E₁(X/R).
        let carried = |x: f64| Some(-(-x).exp_m1() + x * exponential::integral(x, 1)?);
        let value = if claim.starts_with("X=R:") {
            carried(1.0)
        } else if claim.starts_with("X=2R:") {
            carried(2.0)
        } else if claim.starts_with("P(Exp(100)>2*99+1)") {
            Some((-1.99f64).exp())
        } else {
            continue;
        };
        checker.near(claim, value.unwrap_or(f64::NAN), &check["value"], 1e-9 * number(check, "value").abs());
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Rule {
    /// S −= size; if S < 0, record once and S += Exp(R).
    Carry,
    /// S = Exp(R) after a record.
    Reset,
    /// Sizes of R and more are always recorded and not counted down; other sizes carry over.
    LargeAlways,
}

/// Recorded share of both sizes with R = 100, averaged over enough starts for 100,000 cycles in all.
fn shares(cycle: [(u64, u64); 2], rule: Rule, cycles: u64) -> [f64; 2] {
    const INTERVAL: f64 = 100.0;
    let mut state = rng::seed(2, cycles);
    let mut exponential = || -INTERVAL * ((rng::next(&mut state) as f64 + 1.0) / 2f64.powi(64)).ln();
    let mut recorded = [0u64; 2];
    let starts = (100_000 / cycles).max(30);
    for _ in 0..starts {
        let mut left = exponential();
        for _ in 0..cycles {
            for (recorded, (size, times)) in recorded.iter_mut().zip(cycle) {
                if rule == Rule::LargeAlways && size as f64 >= INTERVAL {
                    *recorded += times;
                    continue;
                }
                for _ in 0..times {
                    left -= size as f64;
                    if left < 0.0 {
                        *recorded += 1;
                        left = if rule == Rule::Reset { exponential() } else { left + exponential() };
                    }
                }
            }
        }
    }
    [0, 1].map(|i| recorded[i] as f64 / (starts * cycles * cycle[i].1) as f64)
}
