//! Recovers the sampling interval behind a weight that another program reports. A sample of S bytes that stands for
//! W = S/(1 − e^(−S/R)) bytes was included with probability S/W, whatever R is, so R follows from S and W.

/// Relative error that a reported weight may have in addition to rounding, for example from lower-precision arithmetic.
const TOLERANCE: f64 = 1e-4;

/// The sampling intervals that are consistent with a reported weight. Weights are whole numbers, rounded in an unknown
/// direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IntervalRange {
    /// Smallest consistent interval.
    pub low: f64,
    /// The interval that follows if the reported weight is taken as exact; 0 if the sample was certain to be taken.
    pub exact: f64,
    /// Largest consistent interval.
    pub high: f64,
}

impl IntervalRange {
    /// The intervals under which a sample of `size_bytes` stands for `weighted_bytes`. `None` if there is none, because
    /// a sample stands for at least its own size.
    pub fn of(size_bytes: u64, weighted_bytes: u64) -> Option<Self> {
        if weighted_bytes < size_bytes || weighted_bytes == 0 {
            return None;
        }
        let (size, weighted) = (size_bytes as f64, weighted_bytes as f64);
        Some(Self {
            low: interval_of(size, weighted - 1.0) * (1.0 - TOLERANCE),
            exact: interval_of(size, weighted),
            high: interval_of(size, weighted + 1.0) * (1.0 + TOLERANCE),
        })
    }

    /// Whether `interval` lies in the range.
    pub fn contains(&self, interval: u64) -> bool {
        (self.low..=self.high).contains(&(interval as f64))
    }

    /// The intervals that are also consistent with another weight; `None` if there are none.
    #[must_use]
    pub fn with(&self, other: &Self) -> Option<Self> {
        let (low, high) = (self.low.max(other.low), self.high.min(other.high));
        (low <= high).then_some(Self { low, exact: other.exact, high })
    }

    /// The most likely interval as a whole number. A power of two is preferred, because programs usually choose one. If
    /// the sample was certain to be taken, returns the largest interval: the one under which the most smaller blocks
    /// may have been missed.
    pub fn nearest(&self) -> u64 {
        if self.exact <= 0.0 {
            return (self.high as u64).max(1);
        }
        let power = self.exact.log2().round().exp2() as u64;
        if self.contains(power) {
            return power.max(1);
        }
        (self.exact.clamp(self.low, self.high).round() as u64).max(1)
    }
}

/// R = −S/ln(1 − S/W); 0 if W is not above S. For S = 0, R is the weight itself.
fn interval_of(size: f64, weighted: f64) -> f64 {
    if size == 0.0 {
        return weighted;
    }
    if weighted <= size { 0.0 } else { -size / (-size / weighted).ln_1p() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weight::inclusion;

    /// The weight that a program would report, rounded down, up, and to the nearest number.
    fn stated(size: u64, interval: f64) -> [u64; 3] {
        let weighted = size as f64 / -(-(size as f64) / interval).exp_m1();
        [weighted.floor() as u64, weighted.ceil() as u64, weighted.round() as u64]
    }

    #[test]
    fn the_interval_comes_back_for_every_size_and_rounding() {
        for interval in [4096_u64, 65_536, 524_288, 524_289, 10_000_000] {
            for size in [1, 8, 100, 4096, 500_000, 4 << 20, 64 << 20] {
                for weighted in stated(size, interval as f64) {
                    let range = IntervalRange::of(size, weighted).expect("there is one");
                    assert!(range.contains(interval), "{size} of {interval}: {range:?}");
                }
            }
        }
        let range = IntervalRange::of(100, stated(100, 524_288.0)[2]).expect("there is one");
        assert_eq!(range.nearest(), 524_288);
    }

    #[test]
    fn the_weight_by_the_interval_is_the_one_that_was_stated() {
        for size in [16_u64, 1000, 100_000, 1 << 20] {
            let weighted = stated(size, 524_288.0)[2];
            let interval = IntervalRange::of(size, weighted).expect("there is one").nearest();
            let weight = inclusion(size, interval).expect("can be sampled").weight * size as f64;
            assert!((weight / weighted as f64 - 1.0).abs() < 1e-5, "{size}: {weight} {weighted}");
        }
    }

    #[test]
    fn weights_of_a_count_of_crossings_are_of_no_common_interval() {
        let crossings = |size| IntervalRange::of(size, 524_288).expect("there is one");
        assert_eq!(crossings(100).with(&crossings(10_000)), None);
        let by_bytes = |size| IntervalRange::of(size, stated(size, 524_288.0)[0]).expect("there is one");
        assert!(by_bytes(100).with(&by_bytes(10_000)).is_some_and(|both| both.contains(524_288)));
    }

    #[test]
    fn what_stands_for_less_than_itself_has_no_interval() {
        assert_eq!((IntervalRange::of(100, 99), IntervalRange::of(0, 0)), (None, None));
        let sure = IntervalRange::of(10 << 20, 10 << 20).expect("there is one");
        assert!(sure.low == 0.0 && sure.contains(524_288) && sure.nearest() > 524_288);
        assert_eq!(IntervalRange::of(0, 4096).map(|range| range.nearest()), Some(4096));
        for (size, weighted) in [(1, u64::MAX), (u64::MAX, u64::MAX), (u64::MAX - 1, u64::MAX), (0, u64::MAX)] {
            assert!(IntervalRange::of(size, weighted).is_some_and(|range| range.nearest() >= 1));
        }
    }
}
