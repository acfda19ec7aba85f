//! Confidence intervals of a sampled total, from the sizes of the samples or from their offsets.
//!
//! The number of bytes up to sample s is a negative-binomial waiting time. An observation window that ends anywhere holds s
//! samples and part of the wait for number s + 1. With the offsets of the samples the interval is exact for every mix of
//! sizes ([`from_offsets`]). Without them each offset is replaced by its expectation given the size (Rao–Blackwell), which
//! keeps the width and needs less data ([`from_sizes`], the RB-NB interval). `docs/sampling.md` has the coverage of both.

use serde::Serialize;

use super::gamma::{Tail, quantile};

/// A closed interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// What the samples of a stack say, in trials (bytes, under the default criterion).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sampled {
    /// s: samples of more than zero.
    pub samples: u64,
    /// S: sum of the sampled sizes, not weighted.
    pub sum: f64,
    /// T: the unbiased estimate Σ size × weight.
    pub estimate: f64,
}

/// RB-NB interval of the total that T estimates: [max(S, T − R (s − g(s, α/2))), T + R (g(s + 1, 1 − α/2) − s)], where g(k, ·) is the quantile of
/// Gamma(k, 1) and α = 1 − `confidence`. With R = 1 everything is sampled and the interval is the point T.
pub fn from_sizes(sampled: Sampled, interval: u64, confidence: f64) -> Interval {
    let Sampled { samples, sum, estimate } = sampled;
    if interval == 1 {
        return Interval { low: estimate, high: estimate };
    }
    let (s, r, tail) = (samples as f64, interval as f64, (1.0 - confidence) / 2.0);
    Interval {
        low: (estimate - r * (s - quantile(samples, Tail::Lower, tail))).max(sum),
        high: estimate + r * (quantile(samples.saturating_add(1), Tail::Upper, tail) - s),
    }
}

/// Interval from offsets, with guaranteed coverage: `unskipped` is u = Σ (size − offset), `sum` is S = Σ size.
/// [max(S, u − s + (R − 1) g(s, α/2)), u − s + R g(s + 1, 1 − α/2)].
pub fn from_offsets(samples: u64, unskipped: f64, sum: f64, interval: u64, confidence: f64) -> Interval {
    if interval == 1 {
        return Interval { low: sum, high: sum };
    }
    let (s, r, tail) = (samples as f64, interval as f64, (1.0 - confidence) / 2.0);
    Interval {
        low: (unskipped - s + (r - 1.0) * quantile(samples, Tail::Lower, tail)).max(sum),
        high: unskipped - s + r * quantile(samples.saturating_add(1), Tail::Upper, tail),
    }
}

/// One-sided upper confidence limit of a total without any sample: ln(`tail`) / ln(1 − 1/R), in trials. It is exact for
/// every division of the total into allocations; 0 for R = 1.
pub fn unseen_upper_limit(interval: u64, tail: f64) -> f64 {
    if interval == 1 { 0.0 } else { tail.ln() / super::weight::log_q(interval) }
}

/// Sum of independent estimates and its interval, from their intervals: the distances from estimate to end add in squares
/// (MOVER, the method of variance estimates recovery; Zou and Donner, 2008).
pub fn sum(parts: impl IntoIterator<Item = (f64, Interval)>) -> (f64, Interval) {
    let (mut total, mut below, mut above) = (0.0, 0.0, 0.0);
    for (estimate, interval) in parts {
        total += estimate;
        below += (estimate - interval.low).powi(2);
        above += (interval.high - estimate).powi(2);
    }
    (total, Interval { low: total - f64::sqrt(below), high: total + f64::sqrt(above) })
}

/// Difference `after − before` of independent estimates and its interval (MOVER).
pub fn difference(before: (f64, Interval), after: (f64, Interval)) -> (f64, Interval) {
    let negated = Interval { low: -before.1.high, high: -before.1.low };
    sum([(-before.0, negated), after])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_seen() {
        let unseen = from_sizes(Sampled::default(), 524_288, 0.95);
        assert_eq!(unseen.low, 0.0);
        assert!((unseen.high / 524_288.0 - 3.688_879_454).abs() < 1e-9);
        assert!((unseen_upper_limit(524_288, 0.05) / 524_288.0 - 2.9957).abs() < 1e-4);
        assert_eq!(unseen_upper_limit(1, 0.05), 0.0);
    }

    #[test]
    fn one_sample_is_at_least_its_size() {
        let interval = from_sizes(Sampled { samples: 1, sum: 400_000.0, estimate: 750_000.0 }, 524_288, 0.95);
        assert_eq!(interval.low, 400_000.0);
        assert!(interval.high > 750_000.0);
    }

    #[test]
    fn everything_sampled_is_a_point() {
        let exact = Sampled { samples: 3, sum: 99.0, estimate: 99.0 };
        assert_eq!(from_sizes(exact, 1, 0.95), Interval { low: 99.0, high: 99.0 });
        assert_eq!(from_offsets(3, 99.0, 99.0, 1, 0.95), Interval { low: 99.0, high: 99.0 });
    }

    #[test]
    fn sums_and_differences() {
        let (three, four) = (Interval { low: 7.0, high: 11.0 }, Interval { low: 16.0, high: 25.0 });
        assert_eq!(sum([(10.0, three), (20.0, four)]), (30.0, Interval { low: 25.0, high: 30.0 + 26f64.sqrt() }));
        let (change, interval) = difference((10.0, three), (20.0, four));
        assert_eq!(change, 10.0);
        assert!((interval.low - (10.0 - 17f64.sqrt())).abs() < 1e-12);
        assert!((interval.high - (10.0 + 34f64.sqrt())).abs() < 1e-12);
    }
}
