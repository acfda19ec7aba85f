//! Known answers on changes between two profiles.

use serde_json::Value;

use heapbpf_statistics::growth::{Observed, change, p_no_growth, p_small_allocations, q_values};
use heapbpf_statistics::interval::Sampled;

use crate::check::{Checker, count, number, rows};
use crate::samples::sums_of;

pub fn growth(file: &Value, checker: &mut Checker) {
    for (index, row) in rows(file, "rows").iter().enumerate() {
        let (before, after) = (observed(&row["before"]), observed(&row["after"]));
        for (side, key) in [(&before, "before"), (&after, "after")] {
            checker.close(&format!("row {index} {key} est"), side.sampled.estimate, &row[key]["est"], 1e-9);
        }
        let mut p = |key: &str, actual: f64| {
            let what = format!("row {index} {key}");
            let expected = number(row, key);
            checker.near(&what, actual, &row[key], 1e-6);
            if expected >= 1e-12 {
                checker.close(&what, actual, &row[key], 1e-4);
            }
        };
        p("p_no_growth", p_no_growth(&before, &after));
        p("p_binomial_small_alloc_limit", p_small_allocations(&before, &after));
        let (difference, ends) = change(&before, &after, 0.95);
        let r = before.interval.max(after.interval) as f64;
        for (key, actual) in [("diff", difference), ("ci_lo", ends.low), ("ci_hi", ends.high)] {
            let tolerance = 1e-8 * number(row, key).abs().max(r);
            checker.near(&format!("row {index} {key}"), actual, &row[key], tolerance);
        }
    }
    for (index, family) in rows(file, "benjamini_hochberg").iter().enumerate() {
        let p: Vec<f64> = rows(family, "p").iter().filter_map(Value::as_f64).collect();
        let found = q_values(&p);
        let (q, rejected) = (rows(family, "q"), rows(family, "reject_at_0_05"));
        checker.holds(&format!("family {index} is complete"), q.len() == found.len() && rejected.len() == found.len());
        for ((actual, q), rejected) in found.into_iter().zip(q).zip(rejected) {
            checker.near(&format!("family {index} q"), actual, q, 1e-9);
            checker.holds(&format!("family {index} rejection"), rejected.as_bool() == Some(actual <= 0.05));
        }
    }
}

fn observed(side: &Value) -> Observed {
    let interval = count(side, "interval");
    let sums = sums_of(&side["sampled"], interval);
    let sampled = Sampled { samples: sums.samples, sum: sums.sampled_bytes as f64, estimate: sums.bytes };
    Observed { sampled, interval, exposure: number(side, "exposure") }
}
