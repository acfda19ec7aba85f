//! Known answers on detection, on optimal probabilities, and on what `jeprof` reads.

use serde_json::Value;

use heapbpf_statistics::detect::{detection, size_seen_with, smallest_seen_with};
use heapbpf_statistics::estimators::CUT_OFF_IN_INTERVALS;
use heapbpf_statistics::optimum::{ClassUse, optimum, per_byte, per_byte_variance, proportional_to_size};
use heapbpf_statistics::predistort::{jeprof_scales, predistort};

use crate::check::{Checker, count, number, rows};

fn detection_row(row: &Value, checker: &mut Checker) {
    let (size, r) = (count(row, "size"), count(row, "interval"));
    let Some(found) = detection(size, r) else {
        return checker.fail(&format!("no answer for {size} bytes at R {r}"));
    };
    for (key, actual) in [
        ("p_at_least_one_poisson", found.seen_poisson),
        ("p_at_least_one_binomial", found.seen),
        ("expected_rel_error", found.expected_error),
        ("conditional_expected_rel_error", found.expected_error_if_seen),
        ("expected_rel_error_binomial", found.expected_error_binomial),
        ("rel_sd", found.relative_deviation),
        ("ht_single_alloc_rel_sd", found.single_allocation_deviation),
    ] {
        checker.close(&format!("{key}({size}, {r})"), actual, &row[key], 1e-9);
    }
    let flag = row["above_99pct_cutoff"].as_bool() == Some(found.above_cut_off);
    checker.holds(&format!("cut-off flag({size}, {r})"), flag);
}

pub fn detection_all(file: &Value, checker: &mut Checker) {
    for row in rows(file, "rows") {
        detection_row(row, checker);
    }
    for fact in rows(file, "facts") {
        detection_fact(fact, checker);
    }
}

/// The size that is seen with some probability, at the interval that the claim begins with; and the cut-off.
fn detection_fact(fact: &Value, checker: &mut Checker) {
    let claim = fact["claim"].as_str().unwrap_or_default();
    let kib: Option<u64> = claim.split(' ').next().and_then(|word| word.parse().ok());
    for (key, expected) in fact.as_object().into_iter().flatten() {
        let percent = key.strip_prefix("exact_size_for_").and_then(|rest| rest.strip_suffix("pct_bytes"));
        if let (Some(percent), Some(kib)) = (percent.and_then(|percent| percent.parse::<f64>().ok()), kib) {
            checker.close(key, size_seen_with(percent / 100.0, kib * 1_024), expected, 1e-9);
        }
    }
    if fact["cutoff_over_R"].is_number() {
        checker.close(claim, CUT_OFF_IN_INTERVALS, &fact["cutoff_over_R"], 1e-9);
    }
    for row in rows(fact, "cutoff_bytes") {
        let r = count(row, "interval");
        checker.close(claim, size_seen_with(0.99, r), &row["bytes_poisson"], 1e-9);
        checker.equal(claim, smallest_seen_with(0.99, r), &row["smallest_int_binomial"]);
    }
}

fn optimum_row(row: &Value, name: &str, checker: &mut Checker) {
    let class = |class: &Value| ClassUse {
        size_bytes: number(class, "Z"),
        allocations: number(class, "a"),
        live: number(class, "l"),
    };
    let classes: Vec<ClassUse> = rows(row, "classes").iter().map(class).collect();
    let budget = number(row, "budget");
    let found = optimum(&classes, budget);
    checker.close_or_null(&format!("{name} c"), found.scale, &row["c"], 1e-9);
    let expected = rows(row, "p");
    checker.holds(&format!("{name}: one p for each class"), expected.len() == classes.len());
    for (actual, expected) in found.probabilities.iter().zip(expected) {
        checker.close(&format!("{name} p"), *actual, expected, 1e-9);
    }
    checker.close(&format!("{name} objective"), found.variance, &row["objective"], 1e-9);
    if row["interval"].is_null() {
        return;
    }
    let r = count(row, "interval");
    for (actual, expected) in per_byte(&classes, r).iter().zip(rows(row, "p_bernoulli_bytes")) {
        checker.close(&format!("{name} per-byte p"), *actual, expected, 1e-9);
    }
    let (bernoulli, chromium) = (per_byte_variance(&classes, r), proportional_to_size(&classes, budget).variance);
    checker.close(&format!("{name} per-byte variance"), bernoulli, &row["objective_bernoulli"], 1e-9);
    let ratio = found.variance / bernoulli;
    checker.close(&format!("{name} ratio"), ratio, &row["variance_ratio_opt_over_bernoulli"], 1e-9);
    checker.close(&format!("{name} min(1, Z/R)"), chromium, &row["objective_min1_ZoverR_same_budget"], 1e-9);
    checker.close(&format!("{name} its ratio"), chromium / bernoulli, &row["ratio_min1_over_bernoulli"], 1e-9);
}

pub fn optimum_all(file: &Value, checker: &mut Checker) {
    for (index, row) in rows(file, "rows").iter().enumerate() {
        optimum_row(row, &format!("row {index} ({})", row["name"]), checker);
    }
}

pub fn predistortion(file: &Value, checker: &mut Checker) {
    for (index, row) in rows(file, "rows").iter().enumerate() {
        let (objects, bytes, r) = (number(row, "true_count"), number(row, "true_bytes"), count(row, "interval"));
        let raw = predistort(objects, bytes, r);
        checker.close(&format!("row {index} raw_count"), raw.objects, &row["raw_count"], 1e-12);
        checker.close(&format!("row {index} raw_bytes"), raw.bytes, &row["raw_bytes"], 1e-12);
        let lost = row["lost_by_rounding"].as_bool();
        checker.holds(
            &format!("row {index} lost"),
            lost == Some(raw.objects > 0.0 && number(row, "rounded_count") == 0.0),
        );
        let names = ["jeprof_count_from_rounded", "jeprof_bytes_from_rounded", "rounding_rel_err_bytes"];
        rounded(checker, index, row, (objects, bytes, r), names, row);
        let names = ["jeprof_count", "jeprof_bytes", "rel_err_bytes"];
        rounded(checker, index, row, (objects, bytes, 1), names, &row["header_interval_1"]);
    }
}

/// Rounded figures under one interval in the header, what `jeprof` makes of them, and the error that rounding leaves.
fn rounded(
    checker: &mut Checker,
    index: usize,
    row: &Value,
    (objects, bytes, r): (f64, f64, u64),
    names: [&str; 3],
    expected: &Value,
) {
    let what = |key: &str| format!("row {index} {key} at header interval {r}");
    let raw = predistort(objects, bytes, r);
    let mut whole = |key: &str, value: f64| {
        // A value within rounding error of a half may be rounded either way.
        let tie = ((value - value.floor()) - 0.5).abs() < 1e-9 * value.max(1.0);
        checker.near(&what(key), value.round(), &expected[key], if tie { 1.0 } else { 0.0 });
    };
    whole("rounded_count", raw.objects);
    whole("rounded_bytes", raw.bytes);
    // Computed from the numbers in the file, so that a half rounded the other way is not counted twice.
    let read = jeprof_scales(number(expected, "rounded_count"), number(expected, "rounded_bytes"), r);
    checker.close(&what(names[0]), read.objects, &expected[names[0]], 1e-9);
    checker.close(&what(names[1]), read.bytes, &expected[names[1]], 1e-9);
    let error = (bytes > 0.0 && number(row, "true_count") > 0.0).then(|| (read.bytes / bytes - 1.0).abs());
    match error {
        Some(error) => checker.near(&what(names[2]), error, &expected[names[2]], 1e-9),
        None => checker.holds(&what(names[2]), expected[names[2]].is_null()),
    }
}
