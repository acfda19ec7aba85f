//! What a sampling interval can see: the probability that a site shows up, and how far its estimate is off.
//!
//! m = x/R is the expected number of successes in x bytes. Formulas by definition (heapprofd's charts show them).

use super::binomial::{mean_deviation, poisson_probability};
use super::estimators::above_cut_off;
use super::weight::inclusion;

/// What is to be expected of a site that allocates `size` bytes in all under the interval R.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Detection {
    /// Probability of at least one sample, in the Poisson limit: 1 − e^−m.
    pub seen_poisson: f64,
    /// The same, exact: 1 − (1 − 1/R)^x.
    pub seen: f64,
    /// E|K R − x|/x for the count of successes K ~ Poisson(m): 2 m^⌊m⌋ e^−m / ⌊m⌋!.
    pub expected_error: f64,
    /// The same given at least one sample.
    pub expected_error_if_seen: f64,
    /// The same for K ~ Binomial(x, 1/R).
    pub expected_error_binomial: f64,
    /// Standard deviation of K R relative to x: 1/√m.
    pub relative_deviation: f64,
    /// Relative standard deviation of Horvitz–Thompson if the bytes are a single allocation: √((1 − P)/P).
    pub single_allocation_deviation: f64,
    /// heapprofd takes such an allocation as it is: it is sampled with more than 99 %.
    pub above_cut_off: bool,
}

/// For `size` bytes (at least 1) and R of at least 1; `None` otherwise.
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
            // Without a sample the error is 1: E = e^−m + (1 − e^−m) E_seen.
            (expected_error - (-m).exp()) / -(-m).exp_m1()
        },
        expected_error_binomial: if interval == 1 { 0.0 } else { mean_deviation(size, 1.0 / r) * r / x },
        relative_deviation: (1.0 / m).sqrt(),
        single_allocation_deviation: inclusion.weight_minus_one.sqrt(),
        above_cut_off: above_cut_off(size, interval),
    })
}

/// Bytes that are seen with the given probability: −R ln(1 − probability) (Poisson limit).
pub fn size_seen_with(probability: f64, interval: u64) -> f64 {
    -(interval as f64) * (-probability).ln_1p()
}

/// Smallest whole number of bytes that is seen with more than `probability`, exactly.
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
    fn published_claims() {
        let kib = 1_024;
        let seen = |size, interval| detection(size, interval).expect("in range").seen_poisson;
        assert!((seen(3 * 512 * kib, 512 * kib) - 0.9502).abs() < 1e-4);
        assert!((seen(7 * 512 * kib, 2_048 * kib) - 0.826).abs() < 1e-3);
        assert!((seen(512 * kib, 512 * kib) - 0.632).abs() < 1e-3);
        assert_eq!(smallest_seen_with(0.99, 512 * kib), 2_414_434);
    }

    #[test]
    fn everything_sampled_has_no_error() {
        let all = detection(100, 1).expect("in range");
        assert_eq!((all.seen, all.expected_error_binomial, all.single_allocation_deviation), (1.0, 0.0, 0.0));
        assert_eq!(detection(0, 5), None);
    }
}
