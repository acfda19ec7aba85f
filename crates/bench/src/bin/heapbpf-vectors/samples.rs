//! Known answers on single allocations and on a stack's samples.

use serde_json::Value;

use heapbpf_statistics::Criterion;
use heapbpf_statistics::estimate::{self, Part};
use heapbpf_statistics::interval;
use heapbpf_statistics::sums::SampleSums;
use heapbpf_statistics::weight::{inclusion, poisson_inclusion};

use crate::check::{Checker, count, number, pairs, rows};

pub fn weights(file: &Value, checker: &mut Checker) {
    for row in rows(file, "rows") {
        let (size, r) = (count(row, "size"), count(row, "interval"));
        let n = size as f64;
        let exact = inclusion(size, r);
        let poisson = poisson_inclusion(size, r);
        // exp(n/R) has n/R times the rounding error of its argument.
        let steep = if n / r as f64 > 100.0 { 1e-11 } else { 1e-12 };
        let mut check = |key: &str, actual: Option<f64>, tolerance| {
            checker.close_or_null(&format!("{key}({size}, {r})"), actual, &row[key], tolerance);
        };
        check("p_sample", Some(exact.map_or(0.0, |i| i.probability)), 1e-12);
        check("q_n", Some(exact.map_or(1.0, |i| i.miss_probability())), steep);
        check("count_weight", exact.map(|i| i.weight), 1e-12);
        check("byte_weight", exact.map(|i| n * i.weight), 1e-12);
        check("var_true_bytes", Some(exact.map_or(0.0, |i| i.true_variance(n))), steep);
        check("var_true_count", exact.map(|i| i.true_variance(1.0)), steep);
        check("var_est_bytes", exact.map(|i| i.estimated_variance(n)), steep);
        check("var_est_count", exact.map(|i| i.estimated_variance(1.0)), steep);
        check("p_sample_exp", Some(poisson.map_or(0.0, |i| i.probability)), 1e-12);
        check("byte_weight_exp", poisson.map(|i| n * i.weight), 1e-12);
        check("jemalloc_var_bytes", Some(poisson.map_or(0.0, |i| i.true_variance(n))), steep);
        check("var_multi_bytes", Some(n * (r as f64 - 1.0)), 1e-12);
    }
}

/// Sums of samples given as pairs of size and count; a size of zero means no trial, and therefore no sample.
pub fn sums_of(sampled: &Value, r: u64) -> SampleSums {
    let mut sums = SampleSums::default();
    for (size, times) in pairs(sampled) {
        for _ in 0..times {
            sums.record(size, size, 0, r);
        }
    }
    sums
}

pub fn stacks(file: &Value, checker: &mut Checker) {
    for (index, row) in rows(file, "cases").iter().enumerate() {
        let (r, confidence) = (count(row, "interval"), number(row, "conf"));
        let sums = sums_of(&row["sampled"], r);
        let expected = &row["expect"];
        let mut check =
            |key: &str, actual: f64| checker.close(&format!("case {index} {key}"), actual, &expected[key], 1e-9);
        check("samples", sums.samples as f64);
        check("sum_sampled_bytes", sums.sampled_bytes as f64);
        check("est_bytes", sums.bytes);
        check("est_count", sums.objects);
        check("var_bytes", sums.bytes_variance);
        check("var_count", sums.objects_variance);
        let bytes = estimate::bytes(&[Part::new(r, &sums)], Criterion::Bytes, confidence);
        ends(checker, &format!("case {index}"), expected, r, bytes.low, bytes.high);
    }
    for row in rows(file, "zero_samples") {
        let (r, alpha) = (count(row, "interval"), number(row, "alpha"));
        let what = format!("unseen at R {r}, {alpha}");
        checker.close(&what, interval::unseen_upper_limit(r, alpha), &row["upper_bytes_exact"], 1e-9);
        // The two-sided interval without samples has α/2 beyond its upper end.
        let limit = interval::from_sizes(interval::Sampled::default(), r, 1.0 - 2.0 * alpha).high;
        checker.close(&what, limit, &row["upper_bytes_R_ln"], 1e-9);
    }
    for (index, row) in rows(file, "offset_cases").iter().enumerate() {
        let r = count(row, "interval");
        let found = interval::from_offsets(
            count(row, "samples"),
            number(row, "u"),
            number(row, "sum_sampled_bytes"),
            r,
            number(row, "conf"),
        );
        ends(checker, &format!("offset case {index}"), row, r, Some(found.low), Some(found.high));
    }
}

fn ends(checker: &mut Checker, what: &str, expected: &Value, r: u64, low: Option<f64>, high: Option<f64>) {
    for (key, actual) in [("ci_lo", low), ("ci_hi", high)] {
        let tolerance = 1e-9 * number(expected, key).abs().max(r as f64);
        checker.near(&format!("{what} {key}"), actual.unwrap_or(f64::NAN), &expected[key], tolerance);
    }
}
