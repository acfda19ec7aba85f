//! Growth of a stack between two profiles: a significance test, the confidence interval of the change, and the
//! correction for testing many stacks.

use std::f64::consts::SQRT_2;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};
use statrs::function::erf::erfc;

use super::binomial::at_least;
use super::gamma::{LARGE, log_factorial, lower_series, tails, upper_series};
use super::interval::{self, Interval, Sampled};
use super::sums::SampleSums;

/// How memory in use changed since a point in time, as two independent sets of samples. Blocks that were in use all
/// along are in neither set, so they add nothing to the error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Growth {
    /// Allocated since then and still in use.
    pub kept: SampleSums,
    /// In use then and freed since.
    pub freed: SampleSums,
}

impl Growth {
    /// Adds other samples with the same sampling interval.
    pub fn add(&mut self, other: &Self) {
        self.kept.add(&other.kept);
        self.freed.add(&other.freed);
    }

    /// Whether there are any samples, or bytes of a mapping that was unmapped in part.
    pub const fn is_known(&self) -> bool {
        self.kept.samples > 0 || self.freed.samples > 0 || self.freed.sampled_bytes > 0
    }
}

/// What one profile says about a stack, in trials of one sampling interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Observed {
    /// Its samples.
    pub sampled: Sampled,
    /// R, in trials.
    pub interval: u64,
    /// Divisor that makes totals comparable: seconds, requests, or 1.
    pub exposure: f64,
}

impl Observed {
    /// RB-NB interval per unit of exposure.
    fn rate_interval(&self, confidence: f64) -> (f64, Interval) {
        let interval = interval::from_sizes(self.sampled, self.interval, confidence);
        let exposure = self.exposure;
        (self.sampled.estimate / exposure, Interval { low: interval.low / exposure, high: interval.high / exposure })
    }

    /// A = T − s R: the part of the estimate beyond one interval per sample.
    fn remainder(&self) -> f64 {
        self.sampled.estimate - self.sampled.samples as f64 * self.interval as f64
    }
}

/// Change per unit of exposure, after − before, and its confidence interval: MOVER on the two RB-NB intervals.
pub fn change(before: &Observed, after: &Observed, confidence: f64) -> (f64, Interval) {
    interval::difference(before.rate_interval(confidence), after.rate_interval(confidence))
}

/// p-value of "no growth": P(max(S₁, A₁ + R₁ G(s₁+1))/E₁ ≥ max(S₂, A₂ + R₂ G(s₂))/E₂) with independent gamma variables.
/// 1 if nothing was sampled after. A side with R = 1 is known exactly.
///
/// The error is below 1e-6 and below 1e-4 of the value. From four million samples on it is the error of the normal
/// limit: a few hundredths of any value above 1e-4.
pub fn p_no_growth(before: &Observed, after: &Observed) -> f64 {
    let (s1, s2) = (before.sampled.samples, after.sampled.samples);
    if s2 == 0 {
        return 1.0;
    }
    let least_before = before.sampled.sum / before.exposure;
    let least_after = after.sampled.sum / after.exposure;
    // The waiting time, in units of R₂, of P(after ≤ rate).
    let waiting = |rate: f64| (rate * after.exposure - after.remainder()) / after.interval as f64;
    let after_within = |rate: f64| {
        if rate < least_after {
            0.0
        } else if after.interval == 1 {
            1.0
        } else {
            tails(s2, waiting(rate)).0
        }
    };
    if before.interval == 1 {
        return after_within(before.sampled.estimate / before.exposure);
    }
    if s1.max(s2) >= LARGE && after.interval != 1 {
        return p_no_growth_of_millions(before, after);
    }
    let r1 = before.interval as f64;
    // Below `floor` the rate before is the sampled bytes alone; at `reach` it equals the sampled bytes after.
    let floor = ((before.sampled.sum - before.remainder()) / r1).max(0.0);
    let reach = (least_after * before.exposure - before.remainder()) / r1;
    let at_floor = tails(s1 + 1, floor).0 * after_within(least_before);
    let start = floor.max(reach);
    let rising = if after.interval == 1 {
        tails(s1 + 1, start).1
    } else {
        let offset = waiting(before.remainder() / before.exposure);
        let slope = waiting((before.remainder() + r1) / before.exposure) - offset;
        Waiting::new(s1, s2, offset, slope).integral_from(start)
    };
    (at_floor + rising).clamp(0.0, 1.0)
}

/// Samples from which a gamma variable may be taken as normal next to one of millions.
const ENOUGH_FOR_NORMAL: u64 = 1 << 16;

/// Normal limit of [`p_no_growth`] for millions of samples: A + R G(k) has mean A + R k and standard deviation R √k.
fn p_no_growth_of_millions(before: &Observed, after: &Observed) -> f64 {
    let part = |side: &Observed, shape: u64| {
        let (interval, shape) = (side.interval as f64, shape as f64);
        ((side.remainder() + interval * shape) / side.exposure, interval * shape.sqrt() / side.exposure)
    };
    let (s1, s2) = (before.sampled.samples, after.sampled.samples);
    let (mean_before, deviation_before) = part(before, s1 + 1);
    let (mean_after, deviation_after) = part(after, s2);
    // Compared with few samples, a side with millions is a point.
    if s1 < ENOUGH_FOR_NORMAL {
        return tails(s1 + 1, (mean_after * before.exposure - before.remainder()) / before.interval as f64).1;
    }
    if s2 < ENOUGH_FOR_NORMAL {
        return tails(s2, (mean_before * after.exposure - after.remainder()) / after.interval as f64).0;
    }
    0.5 * erfc((mean_after - mean_before) / deviation_before.hypot(deviation_after) / SQRT_2)
}

/// The limit of [`p_no_growth`] for sizes far below R, which depends on the numbers of samples alone:
/// P(Bin(s₁ + s₂, π) ≥ s₂), π = (E₂/R₂) / (E₁/R₁ + E₂/R₂).
pub fn p_small_allocations(before: &Observed, after: &Observed) -> f64 {
    let (s1, s2) = (before.sampled.samples, after.sampled.samples);
    let (rate1, rate2) = (before.exposure / before.interval as f64, after.exposure / after.interval as f64);
    if s2 == 0 { 1.0 } else { at_least(s1 + s2, s2, rate2 / (rate1 + rate2)) }
}

/// The integrand f(x) F(offset + slope x): the density of Gamma(s₁ + 1) times the distribution function of Gamma(s₂).
/// Its logarithm is concave, so it has a single peak; Gauss–Legendre quadrature covers it between the points where it
/// has become negligible.
struct Waiting {
    s1: f64,
    s2: f64,
    log_factorial1: f64,
    log_factorial2: f64,
    offset: f64,
    slope: f64,
}

/// How far the logarithm falls from its maximum before the rest is neglected: e^−20 of the maximum.
const DEPTH: f64 = 20.0;

impl Waiting {
    fn new(s1: u64, s2: u64, offset: f64, slope: f64) -> Self {
        let (log_factorial1, log_factorial2) = (log_factorial(s1), log_factorial(s2));
        Self { s1: s1 as f64, s2: s2 as f64, log_factorial1, log_factorial2, offset, slope }
    }

    /// ln of the integrand, and its derivative. The logarithms are accurate to 1e-15 of s ln s, which is enough for
    /// p-values and much faster to compute than what quantiles need.
    fn log(&self, x: f64) -> (f64, f64) {
        const PRECISION: f64 = 1e-10;
        let y = self.offset + self.slope * x;
        let factor = self.s2 * y.ln() - y - self.log_factorial2;
        let (tail, hazard) = if y <= self.s2 {
            let sum = lower_series(self.s2, y, PRECISION);
            (factor + sum.ln(), self.s2 / (y * sum))
        } else {
            let factor = factor.exp();
            let upper = factor * upper_series(self.s2, y, PRECISION);
            ((-upper).ln_1p(), factor * self.s2 / (y * (1.0 - upper)))
        };
        if self.s1 == 0.0 {
            return (tail - x, self.slope * hazard - 1.0);
        }
        (self.s1 * x.ln() - x - self.log_factorial1 + tail, self.s1 / x - 1.0 + self.slope * hazard)
    }

    /// Integral from `start` upwards; where F has reached 1 it is the upper tail of f alone.
    fn integral_from(&self, start: f64) -> f64 {
        // From here on F is 1 within 1e-8: its mean plus eight standard deviations, and 10 for the skew of few samples.
        let risen = (self.s2 + 8.0 * self.s2.sqrt() + 10.0 - self.offset) / self.slope;
        if risen <= start {
            return tails(self.s1 as u64 + 1, start).1;
        }
        tails(self.s1 as u64 + 1, risen).1 + self.integral(start.max(-self.offset / self.slope), risen)
    }

    /// Integral from `start`, where F is not below zero, to `end`.
    fn integral(&self, start: f64, end: f64) -> f64 {
        let start = start.max(0.0);
        let top = self.top(start).min(end);
        let height = self.log(top).0;
        let right = if top < end { self.foot(top, height, end) } else { end };
        let left = if top > start { self.foot(top, height, start) } else { start };
        let (middle, half) = ((left + right) / 2.0, (right - left) / 2.0);
        let value = |node: f64| (self.log(middle + half * node).0 - height).exp();
        half * height.exp() * nodes().iter().map(|&(node, weight)| weight * value(node)).sum::<f64>()
    }

    /// Where the integrand is largest, at or above `start`.
    fn top(&self, start: f64) -> f64 {
        let slope_at = |x: f64| self.log(x).1;
        let scale = (self.s1 + 1.0).sqrt();
        let mut low = start + 1e-9 * (start + scale);
        if slope_at(low) <= 0.0 {
            return low;
        }
        let mut high = low.max(self.s1) + scale;
        while slope_at(high) > 0.0 {
            low = high;
            high += 2.0 * (high - start);
        }
        // Only the placement of the nodes depends on it, so a few bisections suffice.
        for _ in 0..6 {
            let middle = (low + high) / 2.0;
            if slope_at(middle) > 0.0 {
                low = middle;
            } else {
                high = middle;
            }
        }
        (low + high) / 2.0
    }

    /// A point between `top` and `limit` where the logarithm is at least [`DEPTH`] below its maximum, or `limit`.
    fn foot(&self, top: f64, height: f64, limit: f64) -> f64 {
        let direction = if limit > top { 1.0 } else { -1.0 };
        let distance = (limit - top).abs();
        let mut step = (self.s1 + 1.0).sqrt().min(distance / 2.0);
        let (mut inside, mut outside) = (0.0, f64::INFINITY);
        for _ in 0..60 {
            if step >= distance {
                step = distance;
                // The integrand may be zero at the limit itself, so its logarithm is not evaluated there.
                outside = step;
                break;
            }
            if height - self.log(top + direction * step).0 > DEPTH {
                outside = step;
                break;
            }
            inside = step;
            step *= 2.0;
        }
        for _ in 0..2 {
            let middle = (inside + outside) / 2.0;
            if height - self.log(top + direction * middle).0 > DEPTH {
                outside = middle;
            } else {
                inside = middle;
            }
        }
        top + direction * outside
    }
}

/// Gauss–Legendre nodes and weights on [−1, 1].
fn nodes() -> &'static [(f64, f64)] {
    const COUNT: usize = 24;
    static NODES: OnceLock<Vec<(f64, f64)>> = OnceLock::new();
    NODES.get_or_init(|| {
        let n = COUNT as f64;
        (0..COUNT)
            .map(|i| {
                // Newton's method on the Legendre polynomial, started at the asymptotic position of its root.
                let mut x = (std::f64::consts::PI * (i as f64 + 0.75) / (n + 0.5)).cos();
                let mut derivative = 1.0;
                for _ in 0..20 {
                    let (mut previous, mut value) = (1.0, x);
                    for k in 2..=COUNT {
                        let k = k as f64;
                        (previous, value) = (value, ((2.0 * k - 1.0) * x * value - (k - 1.0) * previous) / k);
                    }
                    derivative = n * (x * value - previous) / (x * x - 1.0);
                    x -= value / derivative;
                }
                (x, 2.0 / ((1.0 - x * x) * derivative * derivative))
            })
            .collect()
    })
}

/// One-sided p-value from intervals alone, for stacks sampled with several R: the level at which the MOVER interval of
/// the change just excludes zero. `lower_end_at` returns the lower end of that interval at a two-sided confidence
/// level.
pub fn p_from_intervals(lower_end_at: impl Fn(f64) -> f64) -> f64 {
    // Bisection over ln(tail), from e^−36 to one half.
    let excludes = |log_tail: f64| lower_end_at(1.0 - 2.0 * log_tail.exp()) > 0.0;
    let (mut small, mut large) = (-36.0, 0.5f64.ln());
    if !excludes(large) {
        return 1.0;
    }
    if excludes(small) {
        return small.exp();
    }
    for _ in 0..50 {
        let middle = (small + large) / 2.0;
        if excludes(middle) {
            large = middle;
        } else {
            small = middle;
        }
    }
    large.exp()
}

/// Benjamini–Hochberg q-values, in the order of the p-values: q₍ᵣ₎ = min over j ≥ r of p₍ⱼ₎ m / j. Rejecting all q ≤ x
/// keeps the false discovery rate at or below x.
pub fn q_values(p_values: &[f64]) -> Vec<f64> {
    let m = p_values.len() as f64;
    let mut order: Vec<usize> = (0..p_values.len()).collect();
    order.sort_by(|&a, &b| p_values[b].total_cmp(&p_values[a]));
    let mut q = vec![0.0; p_values.len()];
    let mut least = 1.0f64;
    for (position, &index) in order.iter().enumerate() {
        let rank = m - position as f64;
        least = least.min(p_values[index] * m / rank);
        q[index] = least;
    }
    q
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observed(samples: u64, interval: u64) -> Observed {
        // Sizes of one byte: T = s R, A = 0, S = s
        let estimate = samples as f64 * interval as f64;
        Observed { sampled: Sampled { samples, sum: samples as f64, estimate }, interval, exposure: 1.0 }
    }

    #[test]
    fn small_allocations_reach_the_binomial_limit() {
        for (s1, s2) in
            [(0, 1), (0, 5), (3, 3), (10, 30), (200, 260), (3_000, 3_100), (100_000, 100_700), (4_000_000, 4_004_000)]
        {
            let (before, after) = (observed(s1, 1 << 30), observed(s2, 1 << 28));
            let (p, limit) = (p_no_growth(&before, &after), p_small_allocations(&before, &after));
            assert!((p - limit).abs() < 1e-7 + 1e-6 * limit, "{s1} {s2}: {p} {limit}");
        }
    }

    /// The normal limit, up to absurd numbers of samples: no series becomes long.
    #[test]
    fn millions_of_samples() {
        for samples in [LARGE - 1_000, 1 << 32, 1 << 47] {
            for sigmas in [-3.0, 0.0, 2.0, 4.0] {
                let more = samples.saturating_add_signed((sigmas * (2.0 * samples as f64).sqrt()) as i64);
                let (before, after) = (observed(samples, 1 << 20), observed(more, 1 << 20));
                let p = p_no_growth(&before, &after);
                let normal = 0.5 * erfc(sigmas / SQRT_2);
                assert!((p / normal - 1.0).abs() < 0.02, "{samples} {sigmas}: {p}, {normal}");
            }
        }
        // The same amount of memory in few samples and in many.
        for (s1, s2) in [(30, 30 << 22), (30 << 22, 30)] {
            let (before, after) = (observed(s1, (30 << 30) / s1), observed(s2, (30 << 30) / s2));
            let (p, limit) = (p_no_growth(&before, &after), p_small_allocations(&before, &after));
            assert!((p / limit - 1.0).abs() < 1e-3, "{s1} {s2}: {p}, {limit}");
        }
    }

    #[test]
    fn exact_sides_are_points() {
        let exact = |bytes: f64| Observed {
            sampled: Sampled { samples: 3, sum: bytes, estimate: bytes },
            interval: 1,
            exposure: 1.0,
        };
        assert_eq!(p_no_growth(&exact(10.0), &exact(11.0)), 0.0);
        assert_eq!(p_no_growth(&exact(11.0), &exact(11.0)), 1.0);
        let p = p_no_growth(&exact(1e6), &observed(10, 100_000));
        assert!((p - tails(10, 10.0).0).abs() < 1e-9);
        let p = p_no_growth(&observed(10, 100_000), &exact(1e6));
        assert!((p - tails(11, 10.0).1).abs() < 1e-9);
    }

    #[test]
    fn nothing_after_is_no_growth() {
        assert_eq!(p_no_growth(&observed(5, 1_000), &observed(0, 1_000)), 1.0);
    }

    #[test]
    fn inverted_intervals_come_near_the_test() {
        let (before, after) = (observed(5, 1 << 20), observed(20, 1 << 20));
        let inverted = p_from_intervals(|confidence| change(&before, &after, confidence).1.low);
        let direct = p_no_growth(&before, &after);
        assert!((inverted / direct).ln().abs() < 0.7, "{inverted} {direct}");
        assert_eq!(p_from_intervals(|_| -1.0), 1.0);
    }

    #[test]
    fn q_values_by_hand() {
        let q = q_values(&[0.01, 0.04, 0.03, 0.5]);
        let expected = [0.04, 0.16 / 3.0, 0.16 / 3.0, 0.5];
        assert!(q.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-15), "{q:?}");
        assert!(q_values(&[]).is_empty());
    }
}
