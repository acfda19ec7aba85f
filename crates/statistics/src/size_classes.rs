//! Sampling intervals by size class.

use serde::{Deserialize, Serialize};

use super::weight::log_q;

/// Common sampling interval R of size-class sampling, in trials. It is large enough that a whole number of trials gives
/// the interval of a class with a relative error of 7.5e-9 times that interval, and small enough for the draw.
pub const CLASS_INTERVAL: u64 = 1 << 26;
/// Largest sampling interval of a class, in allocations.
pub const LARGEST_CLASS_INTERVAL: f64 = 67_108_864.0;
/// More trials than the largest draw (44.4 R): a class with so many is always sampled.
const ALWAYS: u64 = 45 * CLASS_INTERVAL;

/// A size class and its sampling interval: what `heapbpf plan` writes and `--interval @plan.json` reads.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClassInterval {
    /// Smallest size in the class, in bytes.
    pub from_bytes: u64,
    /// Mean allocations between samples, at least 1.
    pub interval: f64,
}

/// Trials per allocation under [`CLASS_INTERVAL`] with which an allocation is sampled with probability 1/`interval`:
/// the n with 1 − qⁿ = 1/R_c. The interval, in allocations, is clamped to 1 … [`LARGEST_CLASS_INTERVAL`].
pub fn class_trials(interval: f64) -> u64 {
    if interval.is_nan() || interval <= 1.0 {
        return ALWAYS;
    }
    let interval = interval.min(LARGEST_CLASS_INTERVAL);
    let trials = (-1.0 / interval).ln_1p() / log_q(CLASS_INTERVAL);
    (trials.round() as u64).clamp(1, ALWAYS)
}

/// Intervals for even coverage: one sample in `overall` allocations, divided evenly among the classes in use. With
/// shares s_c of m classes, R_c = max(1, overall · m · s_c); samples that a rare class cannot use go to the others.
///
/// `counts` holds the number of allocations by size class, and `from_bytes` returns the smallest size of a class by its
/// index. The result has one entry for each class in use.
pub fn even_coverage(counts: &[f64], overall: f64, from_bytes: impl Fn(usize) -> u64) -> Vec<ClassInterval> {
    let mut used: Vec<(usize, f64)> = counts.iter().copied().enumerate().filter(|(_, count)| *count > 0.0).collect();
    let total: f64 = used.iter().map(|(_, count)| count).sum();
    used.sort_by(|a, b| a.1.total_cmp(&b.1));
    // Divide the remaining samples, the rarest class first: it gets at most all of its allocations.
    let mut budget = total / overall.max(1.0);
    let mut classes: Vec<ClassInterval> = Vec::with_capacity(used.len());
    for (position, &(class, count)) in used.iter().enumerate() {
        let share = budget / (used.len() - position) as f64;
        let samples = share.min(count);
        budget -= samples;
        let interval = (count / samples).clamp(1.0, LARGEST_CLASS_INTERVAL);
        classes.push(ClassInterval { from_bytes: from_bytes(class), interval });
    }
    classes.sort_by_key(|class| class.from_bytes);
    classes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weight::inclusion;

    #[test]
    fn trials_give_the_interval() {
        for interval in [1.5, 2.0, 10.0, 1_000.0, 65_536.0] {
            let weight = inclusion(class_trials(interval), CLASS_INTERVAL).expect("sampled").weight;
            assert!((weight / interval - 1.0).abs() < interval * 1e-8, "{interval}: {weight}");
        }
        for always in [1.0, 0.0, f64::NAN] {
            let weight = inclusion(class_trials(always), CLASS_INTERVAL).expect("sampled").weight;
            assert!((weight - 1.0).abs() < 1e-15);
        }
        assert_eq!(class_trials(f64::INFINITY), 1);
    }

    #[test]
    fn coverage_is_even_and_costs_what_was_asked() {
        let mut counts = [0.0; 64];
        (counts[8], counts[20], counts[40]) = (1e6, 1e4, 20.0);
        let classes = even_coverage(&counts, 1_000.0, |class| 1 << class);
        let samples: Vec<f64> = classes.iter().zip([1e6, 1e4, 20.0]).map(|(class, n)| n / class.interval).collect();
        assert!((samples.iter().sum::<f64>() - 1_010.02).abs() < 1e-6, "{samples:?}");
        assert_eq!(samples[2], 20.0, "a rare class is sampled whole");
        assert!((samples[0] / samples[1] - 1.0).abs() < 1e-12);
    }
}
