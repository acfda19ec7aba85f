//! Bounds on what lost samples stand for, given their number and the sum of their sizes.

use crate::criterion::Criterion;
use crate::interval::Interval;

/// Samples whose records were lost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LostSamples {
    /// l: their number.
    pub samples: u64,
    /// B: unweighted sum of their sizes in bytes.
    pub sampled_bytes: u64,
    /// Smallest sampling interval R under which they may have been drawn, in trials; at least 1.
    pub smallest_interval: u64,
    /// Largest such interval.
    pub largest_interval: u64,
}

impl LostSamples {
    /// Range of Σ size × weight.
    ///
    /// With bytes as trials, size × weight is convex in the size and at most size + R − 1. So the sum is at least that
    /// of l samples of the mean size, and at most B + l (R − 1).
    pub fn bytes(&self, criterion: Criterion) -> Interval {
        let (samples, bytes, smallest, largest) = self.numbers();
        match criterion {
            Criterion::Bytes => {
                Interval { low: bytes * self.least_weight(), high: bytes + samples * (largest - 1.0) }.ordered()
            }
            Criterion::Allocations => Interval { low: bytes * smallest, high: bytes * largest },
            Criterion::SizeClass => Interval { low: bytes, high: bytes * largest },
        }
    }

    /// Range of Σ weight. The weight is convex in the size and at most R.
    pub fn objects(&self, criterion: Criterion) -> Interval {
        let (samples, _, smallest, largest) = self.numbers();
        match criterion {
            Criterion::Bytes => Interval { low: samples * self.least_weight(), high: samples * largest }.ordered(),
            Criterion::Allocations => Interval { low: samples * smallest, high: samples * largest },
            Criterion::SizeClass => Interval { low: samples, high: samples * largest },
        }
    }

    fn numbers(&self) -> (f64, f64, f64, f64) {
        let (smallest, largest) = (self.smallest_interval.max(1), self.largest_interval.max(1));
        (self.samples as f64, self.sampled_bytes as f64, smallest as f64, largest as f64)
    }

    /// The weight of a sample of the mean size under the smallest R.
    fn least_weight(&self) -> f64 {
        let (samples, bytes, smallest, _) = self.numbers();
        if smallest <= 1.0 || samples == 0.0 {
            return 1.0;
        }
        let mean = (bytes / samples).max(1.0);
        -1.0 / f64::exp_m1(mean * f64::ln_1p(-1.0 / smallest))
    }
}

impl Interval {
    /// The same interval with its ends in order, in case rounding swapped them.
    fn ordered(self) -> Self {
        Self { low: self.low.min(self.high), high: self.high }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weight::inclusion;

    fn lost(sizes: &[u64], interval: u64) -> LostSamples {
        LostSamples {
            samples: sizes.len() as u64,
            sampled_bytes: sizes.iter().sum(),
            smallest_interval: interval,
            largest_interval: interval,
        }
    }

    #[test]
    fn if_everything_is_sampled_the_range_is_a_point() {
        for criterion in [Criterion::Bytes, Criterion::Allocations] {
            let lost = lost(&[1, 100, 4_096], 1);
            assert_eq!(lost.bytes(criterion), Interval { low: 4_197.0, high: 4_197.0 });
            assert_eq!(lost.objects(criterion), Interval { low: 3.0, high: 3.0 });
        }
    }

    /// The range holds the true sums for any sizes, and is narrow unless sizes are close to R.
    #[test]
    fn the_range_holds_the_sums_of_the_weighted_samples() {
        const R: u64 = 4_096;
        for sizes in [&[1, 1, 1][..], &[16, 100, 3_000], &[4_096; 5], &[1, 1_000_000], &[8, 16, 24, 500_000, 70_000]] {
            let weights: Vec<f64> = sizes.iter().map(|&size| inclusion(size, R).expect("possible").weight).collect();
            let (lost, slack) = (lost(sizes, R), 1e-6);
            let bytes: f64 = sizes.iter().zip(&weights).map(|(&size, weight)| size as f64 * weight).sum();
            let objects: f64 = weights.iter().sum();
            let (of_bytes, of_objects) = (lost.bytes(Criterion::Bytes), lost.objects(Criterion::Bytes));
            assert!(of_bytes.low <= bytes + slack && bytes <= of_bytes.high + slack, "{sizes:?}: {bytes} {of_bytes:?}");
            assert!(
                of_objects.low <= objects + slack && objects <= of_objects.high + slack,
                "{sizes:?}: {of_objects:?}"
            );
            assert!(of_bytes.high < 1.3 * of_bytes.low, "{of_bytes:?}");
        }
        let wider = LostSamples { largest_interval: 16 * R, ..lost(&[16, 100], R) };
        assert!(wider.bytes(Criterion::Bytes).high > 15.0 * lost(&[16, 100], R).bytes(Criterion::Bytes).high);
    }

    /// More losses never stand for less, so totals do not fall during a recording.
    #[test]
    fn the_range_only_rises() {
        let mut before = lost(&[], 512).bytes(Criterion::Bytes);
        let sizes = [100, 1, 70_000, 8, 512, 511, 4_000, 1, 1];
        for count in 1..=sizes.len() {
            let now = lost(&sizes[..count], 512).bytes(Criterion::Bytes);
            assert!(now.low >= before.low && now.high >= before.high, "{before:?} {now:?}");
            before = now;
        }
    }
}
