//! Confidence intervals of a sampled total, from the sizes of the samples or from their offsets.
//!
//! The number of bytes up to sample s is a negative-binomial waiting time. An observation window that ends anywhere
//! holds s samples and part of the wait for number s + 1. With the offsets of the samples the interval is exact for
//! every mix of sizes ([`from_offsets`]). Without them each offset is replaced by its expectation given the size
//! (Rao–Blackwell), which keeps the width and needs less data ([`from_sizes`], the RB-NB interval). `docs/sampling.md`
//! has the coverage of both.

use serde::Serialize;

use super::gamma::{Tail, quantile};
use super::sums::SampleSums;

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

/// Samples of one sampling interval. A stack that was sampled with several intervals has several parts.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// R: the sampling interval in trials.
    pub interval: u64,
    /// The samples drawn with that interval.
    pub sums: &'a SampleSums,
    /// Further samples that may have been drawn and lost. The upper end of an interval is as far above the estimate as
    /// if they had been recorded; their weights are not included in the estimate.
    pub lost: u64,
    /// The most bytes that a block without a sample could contribute, if not all samples are examined. Matters only if
    /// it is larger than R.
    pub most_bytes: f64,
}

impl<'a> Part<'a> {
    /// A part without lost samples, all of whose samples count.
    pub const fn new(interval: u64, sums: &'a SampleSums) -> Self {
        Self { interval, sums, lost: 0, most_bytes: 0.0 }
    }
}

/// RB-NB interval of the total that T estimates: [max(S, T − R (s − g(s, α/2))), T + R (g(s + 1, 1 − α/2) − s)], where
/// g(k, ·) is the quantile of Gamma(k, 1) and α = 1 − `confidence`. With R = 1 everything is sampled and the interval
/// is the point T.
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

/// Interval of a total to which each sample contributes a part of its size, such as its bytes in memory.
/// T = Σ part × weight, S = Σ part, V = Σ part² w (w − 1). With k = T²/V it is [max(S, V/T g(k, α/2)),
/// (V + m²)/(T + m) g((T + m)²/(V + m²), 1 − α/2)], where m is the most that one unseen sample could contribute: the
/// largest of R, V/T and [`Part::most_bytes`]. This is the gamma interval of weighted sums of counts (Fay and Feuer,
/// 1997). If samples are small and count in full, it equals [`from_sizes`].
///
/// The upper end is as far above T as if each of the part's lost samples had contributed R.
pub fn from_variance(part: &Part<'_>, confidence: f64) -> Interval {
    let Part { interval, sums, lost, most_bytes } = *part;
    let (total, variance, tail) = (sums.bytes, sums.bytes_variance, (1.0 - confidence) / 2.0);
    if interval == 1 && variance <= 0.0 && most_bytes <= 0.0 {
        return Interval { low: total, high: total };
    }
    let (r, lost) = (interval as f64, lost as f64);
    let mean = if total > 0.0 { variance / total } else { 0.0 };
    let one = mean.max(r).max(most_bytes);
    let (most, its_variance) = (total + lost * r + one, variance + lost * r * r + one * one);
    let scaled = |scale: f64, total: f64, end| scale * real_quantile(total / scale, end, tail);
    Interval {
        low: if mean > 0.0 { scaled(mean, total, Tail::Lower).max(sums.sampled_bytes as f64) } else { total },
        high: scaled(its_variance / most, most, Tail::Upper) - lost * r,
    }
}

/// [`quantile`] for a shape of at least 1 that need not be whole: interpolated between the neighbouring whole numbers.
fn real_quantile(shape: f64, tail: Tail, probability: f64) -> f64 {
    let (whole, rest) = (shape.floor(), shape.fract());
    let [below, above] = [whole, whole + 1.0].map(|shape| quantile(shape as u64, tail, probability));
    below + rest * (above - below)
}

/// One-sided upper confidence limit of a total without any sample: ln(`tail`) / ln(1 − 1/R), in trials. It is exact for
/// every division of the total into allocations; 0 for R = 1.
pub fn unseen_upper_limit(interval: u64, tail: f64) -> f64 {
    if interval == 1 { 0.0 } else { tail.ln() / super::weight::log_q(interval) }
}

/// Sum of independent estimates and its interval, from their intervals: the distances from estimate to end add in
/// squares (MOVER, the method of variance estimates recovery; Zou and Donner, 2008).
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
    use sampler_ebpf::rng;

    use super::*;
    use crate::weight::inclusion;

    #[test]
    fn everything_sampled_is_a_point() {
        let exact = Sampled { samples: 3, sum: 99.0, estimate: 99.0 };
        assert_eq!(from_sizes(exact, 1, 0.95), Interval { low: 99.0, high: 99.0 });
        assert_eq!(from_offsets(3, 99.0, 99.0, 1, 0.95), Interval { low: 99.0, high: 99.0 });
    }

    /// If all samples are small and count in full, each stands for R, and both intervals are the same.
    #[test]
    fn of_parts_that_are_whole_it_is_the_interval_of_sizes() {
        let r = 524_288.0;
        for samples in [0, 1, 2, 7, 400] {
            let s = samples as f64;
            let sums = SampleSums { samples, bytes: s * r, bytes_variance: s * r * r, ..SampleSums::NONE };
            let one = from_sizes(Sampled { samples, sum: 0.0, estimate: s * r }, 524_288, 0.95);
            let other = from_variance(&Part::new(524_288, &sums), 0.95);
            assert!((one.low / r - other.low / r).abs() < 1e-9, "{one:?} {other:?}");
            assert!((one.high / r - other.high / r).abs() < 1e-9, "{one:?} {other:?}");
        }
        let exact = SampleSums { samples: 3, bytes: 99.0, ..SampleSums::NONE };
        assert_eq!(from_variance(&Part::new(1, &exact), 0.95), Interval { low: 99.0, high: 99.0 });
        let lossy = from_variance(&Part { lost: 2, ..Part::new(524_288, &SampleSums::NONE) }, 0.95);
        assert!((lossy.high / r - (quantile(3, Tail::Upper, 0.025) - 2.0)).abs() < 1e-9);
    }

    /// The share of a block that is in memory, given a uniform random number.
    type PartOf = fn(f64) -> f64;
    /// An interval at 95 %.
    type IntervalOf = fn(&Part<'_>) -> Interval;

    /// Coverage for blocks that are partly in memory: fully, by a tenth, or by a uniform share. Sizes are in R, `mean`
    /// is the mean number of samples, and a share `look` of the samples is examined. Returns the share of `runs` in
    /// which the interval `of` what was sampled holds the truth.
    fn coverage_of_parts(
        (sizes, part): (&[f64], PartOf),
        mean: f64,
        look: f64,
        (runs, seed): (u32, u64),
        of: IntervalOf,
    ) -> f64 {
        let r = 4096;
        let mut state = rng::seed(seed, 0);
        let mut uniform = || (rng::next(&mut state) >> 11) as f64 / 2f64.powi(53);
        let sizes: Vec<u64> = sizes.iter().map(|size| (size * r as f64).max(16.0) as u64).collect();
        let inclusions: Vec<_> = sizes.iter().map(|&size| inclusion(size, r).expect("trials").thinned(look)).collect();
        let largest = sizes.iter().fold(r, |largest, &size| largest.max(size)) as f64;
        let of_one_each: f64 = inclusions.iter().map(|it| it.probability).sum();
        let blocks = (mean / of_one_each).ceil() as u64;
        let mut held = 0;
        for _ in 0..runs {
            let (mut sums, mut truth) = (SampleSums::default(), 0);
            for (&size, inclusion) in sizes.iter().zip(&inclusions) {
                for _ in 0..blocks {
                    let bytes = (size as f64 * part(uniform())).round() as u64;
                    truth += bytes;
                    if bytes > 0 && uniform() < inclusion.probability {
                        sums.record_included(bytes, 0, inclusion);
                    }
                }
            }
            let most_bytes = if look < 1.0 { largest / look } else { 0.0 };
            let ends = of(&Part { most_bytes, ..Part::new(r, &sums) });
            held += u32::from(ends.low <= truth as f64 && truth as f64 <= ends.high);
        }
        f64::from(held) / f64::from(runs)
    }

    fn coverage_in_all_situations(runs: u32, looks: &[f64], of: IntervalOf) -> f64 {
        let sizes: [(&str, &[f64]); 4] =
            [("0.02 R", &[0.02]), ("0.5 R", &[0.5]), ("4 R", &[4.0]), ("0.05, 0.5 and 3 R", &[0.05, 0.5, 3.0])];
        let parts: [(&str, PartOf); 4] = [
            ("all", |_| 1.0),
            ("a tenth", |_| 0.1),
            ("a share", |uniform| uniform),
            ("all or nothing", |uniform| f64::from(u8::from(uniform < 0.3))),
        ];
        let mut worst: f64 = 1.0;
        for (name, sizes) in sizes {
            for (what, part) in parts {
                for &look in looks {
                    let held = |mean| coverage_of_parts((sizes, part), mean, look, (runs, 7), of);
                    let held = [1.0, 3.0, 10.0, 100.0].map(held);
                    println!("{name}, in memory {what}, looked at {look}: {held:.3?}");
                    worst = held.into_iter().fold(worst, f64::min);
                }
            }
        }
        worst
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

    mod long {
        use super::*;

        /// Seeded; 4,000 runs of each situation, whose standard error is 0.35 %.
        #[test]
        fn parts_of_blocks_are_covered() {
            let worst = coverage_in_all_situations(4_000, &[1.0, 0.25], |part| from_variance(part, 0.95));
            assert!(worst > 0.93, "{worst}");
        }

        /// The same of the parts of mappings that count as in use: the interval of whole blocks holds them, too.
        #[test]
        fn parts_of_blocks_are_in_the_interval_of_whole_ones() {
            let of_whole = |part: &Part<'_>| {
                let Part { interval, sums, .. } = *part;
                let sampled =
                    Sampled { samples: sums.sized_samples(), sum: sums.sampled_bytes as f64, estimate: sums.bytes };
                from_sizes(sampled, interval, 0.95)
            };
            let worst = coverage_in_all_situations(4_000, &[1.0], of_whole);
            assert!(worst > 0.93, "{worst}");
        }
    }
}
