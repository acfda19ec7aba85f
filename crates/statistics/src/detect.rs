//! Detection: the probability that a call site is sampled at all, and the expected error of its estimate.
//!
//! m = x/R is the expected number of successes in x bytes. The formulas follow from the definitions; heapprofd's
//! documentation charts the same quantities.

use super::binomial::{mean_deviation, poisson_probability};
use super::estimators::above_cut_off;
use super::weight::inclusion;

/// What to expect of a call site that allocates x bytes in all under the sampling interval R.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Detection {
    /// Probability of at least one sample, in the Poisson limit: 1 − e^−m.
    pub seen_poisson: f64,
    /// Probability of at least one sample, exact: 1 − (1 − 1/R)^x.
    pub seen: f64,
    /// Expected relative error E|K R − x|/x for the count of successes K ~ Poisson(m): 2 m^⌊m⌋ e^−m / ⌊m⌋!.
    pub expected_error: f64,
    /// `expected_error`, given that there is at least one sample.
    pub expected_error_if_seen: f64,
    /// `expected_error` for K ~ Binomial(x, 1/R).
    pub expected_error_binomial: f64,
    /// Relative standard deviation of K R: 1/√m.
    pub relative_deviation: f64,
    /// Relative standard deviation of the Horvitz–Thompson estimate if the bytes are one allocation: √((1 − P)/P).
    pub single_allocation_deviation: f64,
    /// Whether heapprofd would record one allocation of that size unscaled: its inclusion probability is above 0.99.
    pub above_cut_off: bool,
}

/// Detection of a call site that allocates `size` bytes in all; `None` unless `size` and `interval` are at least 1.
pub fn detection(size: u64, interval: u64) -> Option<Detection> {
    let inclusion = inclusion(size, interval)?;
    let (x, r) = (size as f64, interval as f64);
    let m = x / r;
    let whole = m.floor() as u64;
    let expected_error = 2.0 * poisson_probability(whole, m);
    Some(Detection {
        seen_poisson: -(-m).exp_m1(),
        seen: inclusion.probability,
        expected_error,
        expected_error_if_seen: if whole == 0 {
            1.0 / m.exp_m1()
        } else {
            // Without a sample the relative error is 1: E = e^−m + (1 − e^−m) E_seen.
            (expected_error - (-m).exp()) / -(-m).exp_m1()
        },
        expected_error_binomial: if interval == 1 { 0.0 } else { mean_deviation(size, 1.0 / r) * r / x },
        relative_deviation: (1.0 / m).sqrt(),
        single_allocation_deviation: inclusion.weight_minus_one.sqrt(),
        above_cut_off: above_cut_off(size, interval),
    })
}

/// Bytes at which a call site gets at least one sample with the given probability, in the Poisson limit:
/// −R ln(1 − probability).
pub fn size_seen_with(probability: f64, interval: u64) -> f64 {
    -(interval as f64) * (-probability).ln_1p()
}

/// Smallest whole number of bytes that is sampled with a probability above `probability`, computed exactly.
pub fn smallest_seen_with(probability: f64, interval: u64) -> u64 {
    if interval <= 1 {
        return 1;
    }
    let sure = |size: u64| inclusion(size, interval).is_some_and(|i| i.probability > probability);
    let mut size = ((-probability).ln_1p() / super::weight::log_q(interval)).floor().max(1.0) as u64;
    while size > 1 && sure(size - 1) {
        size -= 1;
    }
    while !sure(size) {
        size += 1;
    }
    size
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_sampled_has_no_error() {
        let all = detection(100, 1).expect("in range");
        assert_eq!((all.seen, all.expected_error_binomial, all.single_allocation_deviation), (1.0, 0.0, 0.0));
        assert_eq!(detection(0, 5), None);
    }

    #[test]
    fn the_smallest_size_is_sampled_just_often_enough() {
        assert_eq!(smallest_seen_with(0.99, 1), 1);
        for (probability, interval) in [(0.5, 2), (0.95, 10), (0.95, 1_000), (0.1, 7)] {
            let size = smallest_seen_with(probability, interval);
            let seen = |size| detection(size, interval).map_or(0.0, |found| found.seen);
            assert!(seen(size) > probability && seen(size - 1) <= probability, "{interval}: {size}");
        }
    }
}
