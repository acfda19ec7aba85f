//! Known answers on waiting times: the geometric draw and the negative-binomial estimator.

use serde_json::Value;

use heapbpf_statistics::binomial::{waiting_cdf, waiting_quantile};
use heapbpf_statistics::estimators::{
    Window, largest_draw, negative_binomial_interval, offset_estimate, offset_variance,
};
use heapbpf_statistics::weight::{inclusion, log_q};
use sampler_ebpf::constants::draw_constants;
use sampler_ebpf::geometric::{DrawConstants, draw};

use crate::check::{Checker, count, number, rows};

/// Largest interval whose distribution of draws is computed value by value.
const WHOLE_DISTRIBUTION_UP_TO: u64 = 1_000;

pub fn geometric(file: &Value, checker: &mut Checker) {
    for row in rows(file, "draws") {
        let (random, r) = (count(row, "r"), count(row, "interval"));
        let Some(constants) = draw_constants(r) else {
            checker.fail(&format!("no constants for R {r}"));
            continue;
        };
        let drawn = draw(random, &constants);
        let off = drawn.abs_diff(count(row, "draw"));
        checker.holds(
            &format!("draw({random}, {r}) = {drawn}, expected {}", row["draw"]),
            off <= count(row, "tol_recommended"),
        );
    }
    let acceptance = &file["header"]["distribution_acceptance"];
    for row in rows(file, "constants") {
        let r = count(row, "interval");
        let Some(constants) = draw_constants(r) else {
            checker.fail(&format!("no constants for R {r}"));
            continue;
        };
        checker.equal(&format!("C({r})"), constants.multiplier, &row["C"]);
        checker.equal(&format!("shift({r})"), constants.shift, &row["shift"]);
        checker.close(&format!("c({r})"), -std::f64::consts::LN_2 / log_q(r), &row["c"], 1e-12);
        checker.equal(&format!("largest draw({r})"), draw(0, &constants), &row["max_draw"]);
        if (2..=WHOLE_DISTRIBUTION_UP_TO).contains(&r) {
            distribution(&constants, acceptance, checker);
        }
    }
    for row in rows(file, "cdf") {
        let (r, k) = (count(row, "interval"), count(row, "k"));
        let cdf = inclusion(k, r).map_or(0.0, |inclusion| inclusion.probability);
        checker.close(&format!("cdf({k}, {r})"), cdf, &row["cdf"], 1e-12);
    }
}

/// Mean, variance and greatest distance from the geometric distribution, over all 2^64 random numbers. Draws fall as
/// the random number rises, so bisection finds where they change from k to k + 1, which gives P(draw > k).
fn distribution(constants: &DrawConstants, acceptance: &Value, checker: &mut Checker) {
    let r = constants.interval as f64;
    let (mut mean, mut square, mut distance) = (0.0, 0.0, 0.0f64);
    for k in 0..draw(0, constants) {
        let (mut greater, mut not) = (0u64, u64::MAX);
        while not - greater > 1 {
            let middle = greater + (not - greater) / 2;
            if draw(middle, constants) > k { greater = middle } else { not = middle }
        }
        let beyond = if k == 0 { 1.0 } else { (greater as f64 + 1.0) / 2f64.powi(64) };
        mean += beyond;
        square += (2 * k + 1) as f64 * beyond;
        distance = distance.max((beyond - (k as f64 * log_q(constants.interval)).exp()).abs());
    }
    let variance = square - mean * mean;
    let within = |key: &str, error: f64| error.abs() <= number(acceptance, key);
    let what = |name: &str, error: f64| format!("{name} of draws at R {r} is off by {error:e}");
    let errors =
        [("mean_rel_err", mean / r - 1.0), ("var_rel_err", variance / (r * (r - 1.0)) - 1.0), ("ks", distance)];
    for (key, error) in errors {
        checker.holds(&what(key, error), within(key, error));
    }
}

pub fn negative_binomial(file: &Value, checker: &mut Checker) {
    // The table is for one sample in 100 KiB, at 95 %.
    const TABLE_INTERVAL: u64 = 102_400;
    for row in rows(file, "published_table") {
        let s = count(row, "s");
        let ends = [("low", 0.025), ("high", 0.975)];
        for (end, level) in ends {
            let found = waiting_quantile(level, s, TABLE_INTERVAL);
            checker.near(&format!("ppf {level} of {s}"), found as f64, &row[format!("ppf_{end}")], 1.0);
            let published = &row[format!("published_{end}")];
            checker.near(&format!("published {level} of {s}"), found.saturating_sub(1) as f64, published, 1.0);
            let cdf = waiting_cdf(published.as_u64().unwrap_or_default(), s, TABLE_INTERVAL);
            checker.close(
                &format!("cdf at published {level} of {s}"),
                cdf,
                &row[format!("cdf_at_published_{end}")],
                1e-9,
            );
        }
    }
    let example = &file["worked_example"];
    if !example.is_null() {
        let (s, u) = (count(example, "s"), count(example, "u"));
        let found = negative_binomial_interval(s, u, TABLE_INTERVAL, 0.95, Window::AtSample);
        checker.close("worked example", offset_estimate(s, u, TABLE_INTERVAL), &example["est"], 1e-12);
        checker.near("worked example, low", found.low, &example["published_low"], 1.0);
        checker.near("worked example, high", found.high, &example["published_high"], 1.0);
    }
    for row in rows(file, "document_claims") {
        document_claim(row, TABLE_INTERVAL, checker);
    }
    for (index, row) in rows(file, "cases").iter().enumerate() {
        let (r, s, u, confidence) = (count(row, "interval"), count(row, "s"), count(row, "u"), number(row, "conf"));
        let tail = (1.0 - confidence) / 2.0;
        let mut near = |key: &str, actual: f64| checker.near(&format!("case {index} {key}"), actual, &row[key], 1.0);
        near("ppf_low", waiting_quantile(tail, s, r) as f64);
        near("ppf_high", waiting_quantile(1.0 - tail, s, r) as f64);
        near("ppf_high_s_plus_1", waiting_quantile(1.0 - tail, s + 1, r) as f64);
        let at_sample = negative_binomial_interval(s, u, r, confidence, Window::AtSample);
        near("ci_low", at_sample.low);
        near("ci_high", at_sample.high);
        near("ci_high_open_end", negative_binomial_interval(s, u, r, confidence, Window::Open).high);
        checker.close(&format!("case {index} est"), offset_estimate(s, u, r), &row["est_bytes"], 1e-12);
        checker.close(&format!("case {index} var"), offset_variance(s, r), &row["var_est"], 1e-12);
    }
}

/// Numbers stated in the literature.
fn document_claim(row: &Value, r: u64, checker: &mut Checker) {
    let claim = row["claim"].as_str().unwrap_or_default();
    let value = &row["value"];
    // "… at N samples": relative distance of the interval's ends from s R.
    let samples = claim.rsplit(" at ").next().and_then(|tail| tail.split(' ').next()?.parse::<u64>().ok());
    if let (Some(s), true) = (samples, value.is_array()) {
        let expected = s as f64 * r as f64;
        for (end, level) in [(0, 0.025), (1, 0.975)] {
            // The table is exact to one failed trial in the quantile.
            let found = (waiting_quantile(level, s, r).saturating_sub(1) as f64) / expected - 1.0;
            checker.near(claim, found, &value[end], 1.5 / expected);
        }
    } else if claim.starts_with("largest draw") {
        checker.close(claim, largest_draw(1.0 / (2f64.powi(31) - 1.0), r), value, 1e-9);
    } else if claim.starts_with("probability of a longer run") {
        checker.close(claim, 100.0 / (2f64.powi(31) - 1.0), value, 1e-9);
    }
}
