//! Other published estimators, computed from the same samples for comparison with Horvitz–Thompson.

use serde::{Deserialize, Serialize};

use super::binomial;
use super::estimate::NO_OFFSETS;
use super::interval::{Interval, Sampled, from_offsets, from_sizes};
use super::part::Part;
use super::weight::inclusion;
use crate::sums::SampleSums;

/// A rule that estimates bytes from samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Estimator {
    /// Weight 1/(1 − qⁿ) for each sample: unbiased, with the least variance of these.
    #[default]
    HorvitzThompson,
    /// Successes × R, as heapprofd and Chromium count: an allocation may hold several successful trials.
    CountOfSuccesses,
    /// Chromium's first rule, which takes min(1, size/R) for the inclusion probability.
    SizeOverInterval,
    /// s (R − 1) + u, from the offset of the successful byte in each sampled allocation, as in .NET.
    Offset,
}

impl Estimator {
    /// Every estimator.
    pub const ALL: [Self; 4] = [Self::HorvitzThompson, Self::CountOfSuccesses, Self::SizeOverInterval, Self::Offset];

    /// Name of the estimator in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::HorvitzThompson => "horvitz-thompson",
            Self::CountOfSuccesses => "count-of-successes",
            Self::SizeOverInterval => "size-over-interval",
            Self::Offset => "offset",
        }
    }
}

/// One sample, where trials are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Size of the allocation in bytes.
    pub size: u64,
    /// Failed trials before the successful one.
    pub offset: u64,
    /// R: the sampling interval in bytes.
    pub interval: u64,
}

/// ln 100: an allocation above this many R is sampled with a probability above 0.99.
pub const CUT_OFF_IN_INTERVALS: f64 = std::f64::consts::LN_10 * 2.0;

/// Whether heapprofd would record an allocation of `size` bytes unscaled, because its inclusion probability is above
/// 0.99.
pub fn above_cut_off(size: u64, interval: u64) -> bool {
    inclusion(size, interval).is_some_and(|inclusion| inclusion.miss_probability() < 0.01)
}

impl Sample {
    /// Bytes that this sample represents under `estimator`. `random` returns 64 uniform random bits; only the count of
    /// successes uses it.
    pub fn bytes(&self, estimator: Estimator, random: impl FnMut() -> u64) -> f64 {
        let (size, r) = (self.size as f64, self.interval as f64);
        match estimator {
            Estimator::HorvitzThompson => inclusion(self.size, self.interval).map_or(0.0, |i| size * i.weight),
            Estimator::CountOfSuccesses if above_cut_off(self.size, self.interval) => size,
            Estimator::CountOfSuccesses => self.successes(random) as f64 * r,
            Estimator::SizeOverInterval => size.max(r),
            Estimator::Offset => r - 1.0 + self.unskipped() as f64,
        }
    }

    /// Successes among all trials of this allocation. The sampler stopped at the first one; the further ones are drawn
    /// here from Binomial(size − offset − 1, 1/R), the distribution of a sampler that goes on.
    pub fn successes(&self, random: impl FnMut() -> u64) -> u64 {
        let rest = self.unskipped().saturating_sub(1);
        1 + binomial::draw(rest, 1.0 / self.interval.max(1) as f64, random)
    }

    /// size − offset: the successful trial and those after it.
    pub fn unskipped(&self) -> u64 {
        self.size.saturating_sub(self.offset)
    }
}

/// Why the rule min(1, size/R) cannot be computed from the sums of a stack.
pub const SIZES_ON_BOTH_SIDES: &str = "sizes below and above the sampling interval are mixed in one stack";

/// Estimates the bytes of a stack from its sums, which is what a saved profile has. Trials must be bytes; `random`
/// returns 64 uniform random bits.
///
/// The further successes of all samples add up to a single binomial variable, so single samples are not needed. The
/// 99 % cut-off is applied if all sizes are above it; in a mixed stack all successes are counted, which is unbiased as
/// well.
///
/// # Errors
/// [`SIZES_ON_BOTH_SIDES`]: the rule min(1, size/R) needs sizes that are all below or all above R. [`NO_OFFSETS`]: the
/// rule needs offsets, and one is not known.
pub fn bytes_of_sums(
    sums: &SampleSums,
    interval: u64,
    estimator: Estimator,
    random: impl FnMut() -> u64,
) -> Result<f64, &'static str> {
    let (samples, unskipped) = (sums.sized_samples(), sums.unskipped().ok_or(NO_OFFSETS));
    let (sampled_bytes, r) = (sums.sampled_bytes as f64, interval as f64);
    Ok(match estimator {
        _ if samples == 0 => 0.0,
        Estimator::HorvitzThompson => sums.bytes,
        Estimator::CountOfSuccesses if above_cut_off(sums.smallest_bytes, interval) => sampled_bytes,
        Estimator::CountOfSuccesses => {
            let further = binomial::draw(unskipped?.saturating_sub(samples), 1.0 / r.max(1.0), random);
            (samples + further) as f64 * r
        }
        Estimator::SizeOverInterval if sums.largest_bytes <= interval => samples as f64 * r,
        Estimator::SizeOverInterval if sums.smallest_bytes >= interval => sampled_bytes,
        Estimator::SizeOverInterval => return Err(SIZES_ON_BOTH_SIDES),
        Estimator::Offset => offset_estimate(samples, unskipped?, interval),
    })
}

/// Why the rule min(1, size/R) has no interval.
pub const BIASED: &str = "min(1, size/R) is biased for this sampler: no interval holds";
/// Why some counts of successes have no interval.
pub const TAKEN_AS_THEY_ARE: &str = "sizes above the 99 % cut-off are taken as they are: up to 1 % of them is missing";

/// Above this many samples the gamma limit replaces the negative binomial. The ends agree within 2e-4 of the interval's
/// width, and a file that claims an absurd number of samples costs no time.
const MOST_EXACT: u64 = 100_000;

/// Confidence interval of `figure`, a result of [`bytes_of_sums`] or a sum of such results under one R.
///
/// For the offset estimator it is the exact negative-binomial interval. Each thread has a countdown of its own, and the
/// observation window of each ends while a countdown is running. But the trials of all threads are independent and
/// identically distributed, so the windows can be laid end to end: an unfinished wait continues in the next thread, s
/// and u add up, and one open end remains. A count of successes K covers all bytes: these are at least the bytes up to
/// success number K and fewer than the bytes up to number K + 1. That is the same distribution, with nothing skipped.
///
/// # Errors
/// The reason why there is no interval.
pub fn interval_of_sums(
    part: &Part<'_>,
    figure: f64,
    estimator: Estimator,
    confidence: f64,
) -> Result<Interval, &'static str> {
    let Part { interval, sums, lost, .. } = *part;
    let sampled_bytes = sums.sampled_bytes as f64;
    if interval == 1 {
        return Ok(Interval { low: sampled_bytes, high: sampled_bytes });
    }
    let (samples, unskipped) = match estimator {
        Estimator::HorvitzThompson => {
            let samples = sums.sized_samples().saturating_add(lost);
            let sampled = Sampled { samples, sum: sampled_bytes, estimate: sums.bytes };
            return Ok(from_sizes(sampled, interval, confidence));
        }
        Estimator::SizeOverInterval => return Err(BIASED),
        Estimator::CountOfSuccesses if above_cut_off(sums.largest_bytes, interval) => return Err(TAKEN_AS_THEY_ARE),
        Estimator::CountOfSuccesses => {
            sums.unskipped().ok_or(NO_OFFSETS)?;
            let successes = (figure / interval as f64).round() as u64;
            (successes, successes)
        }
        Estimator::Offset => (sums.sized_samples(), sums.unskipped().ok_or(NO_OFFSETS)?),
    };
    let samples = samples.saturating_add(lost);
    let ends = if samples > MOST_EXACT {
        from_offsets(samples, unskipped as f64, sampled_bytes, interval, confidence)
    } else {
        negative_binomial_interval(samples, unskipped, interval, confidence, Window::Open)
    };
    // A lost sample represents R − 1 trials and those that it did not skip.
    let of_lost = lost as f64 * (interval as f64 - 1.0);
    Ok(Interval { low: (ends.low - of_lost).max(sampled_bytes), high: ends.high - of_lost })
}

/// Estimate from offsets: s q/p + u = s (R − 1) + u, u = Σ (size − offset).
pub fn offset_estimate(samples: u64, unskipped: u64, interval: u64) -> f64 {
    samples as f64 * (interval as f64 - 1.0) + unskipped as f64
}

/// Variance of [`offset_estimate`], s q/p² = s R (R − 1), for a window that ends at sample number s.
pub fn offset_variance(samples: u64, interval: u64) -> f64 {
    samples as f64 * interval as f64 * (interval as f64 - 1.0)
}

/// Where the observation window of a [`negative_binomial_interval`] ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// At a sample, as in the published table.
    AtSample,
    /// Anywhere, so that a countdown was still running; the upper end allows for it.
    Open,
}

/// Exact confidence interval of the bytes behind s samples: quantiles of the negative binomial number of failed trials,
/// plus u.
///
/// Both ends follow the published convention, the largest number whose cumulative probability is below the level, that
/// is the quantile − 1. With [`Window::Open`] the upper end is the quantile for s + 1 itself.
pub fn negative_binomial_interval(
    samples: u64,
    unskipped: u64,
    interval: u64,
    confidence: f64,
    window: Window,
) -> Interval {
    let tail = (1.0 - confidence) / 2.0;
    let u = unskipped as f64;
    let low = binomial::waiting_quantile(tail, samples, interval);
    let high = match window {
        Window::AtSample => binomial::waiting_quantile(1.0 - tail, samples, interval).saturating_sub(1),
        Window::Open => binomial::waiting_quantile(1.0 - tail, samples.saturating_add(1), interval),
    };
    Interval { low: low.saturating_sub(1) as f64 + u, high: high as f64 + u }
}

/// Largest possible geometric draw, in failed trials, from uniform random numbers that are at least `smallest`.
pub fn largest_draw(smallest: f64, interval: u64) -> f64 {
    smallest.ln() / super::weight::log_q(interval)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sampler_ebpf::{geometric::draw, rng, sampler::step};

    /// Seeded: all estimators on the same samples. Horvitz–Thompson, the completed count of successes and offsets are
    /// unbiased (within 5 standard errors of 3,000 runs); min(1, size/R) is not.
    #[test]
    fn unbiased_but_for_the_first_rule() {
        let interval = 50;
        let constants = sampler_ebpf::constants::draw_constants(interval).expect("in range");
        let sizes = [20u64, 50, 3, 90, 1, 45, 60, 7, 33];
        let truth = sizes.iter().sum::<u64>() as f64;
        let runs = 3_000;
        let mut state = rng::seed(4, 0);
        let mut completion = rng::seed(5, 0);
        let mut sums = [(0.0, 0.0); 4];
        for _ in 0..runs {
            // Each run is an observation window of its own: the countdown is drawn anew, the unfinished one is dropped.
            let mut remaining = draw(rng::next(&mut state), &constants);
            let mut totals = [0.0; 4];
            for size in sizes {
                if let Some(offset) = step(&mut remaining, size) {
                    remaining = draw(rng::next(&mut state), &constants);
                    let sample = Sample { size, offset, interval };
                    for (total, estimator) in totals.iter_mut().zip(Estimator::ALL) {
                        *total += sample.bytes(estimator, || rng::next(&mut completion));
                    }
                }
            }
            for ((sum, squares), total) in sums.iter_mut().zip(totals) {
                *sum += total;
                *squares += total * total;
            }
        }
        for ((sum, squares), estimator) in sums.into_iter().zip(Estimator::ALL) {
            let mean = sum / f64::from(runs);
            let error = ((squares / f64::from(runs) - mean * mean) / f64::from(runs)).sqrt();
            let sigmas = (mean - truth) / error;
            if estimator == Estimator::SizeOverInterval {
                assert!(sigmas.abs() > 5.0, "{estimator:?} {mean}");
            } else {
                assert!(sigmas.abs() < 5.0, "{estimator:?} {mean} {error}");
            }
        }
    }

    /// Sums give the same estimates as single samples; the count of successes does so on average (seeded, 5 σ of 4,000
    /// runs).
    #[test]
    fn sums_are_enough() {
        let interval = 1_000;
        let given = [(400u64, 17u64), (900, 800), (1_000, 3), (20, 19)];
        let mut sums = SampleSums::default();
        given.iter().for_each(|&(size, offset)| sums.record(size, size, offset, interval));
        let samples = given.map(|(size, offset)| Sample { size, offset, interval });
        for estimator in [Estimator::HorvitzThompson, Estimator::SizeOverInterval, Estimator::Offset] {
            let single: f64 = samples.iter().map(|sample| sample.bytes(estimator, || 0)).sum();
            let summed = bytes_of_sums(&sums, interval, estimator, || 0).expect("all sizes up to R");
            assert!((single - summed).abs() < 1e-9 * single, "{estimator:?}");
        }
        let mut state = rng::seed(1, 1);
        let runs = 4_000;
        let mean: f64 = (0..runs)
            .filter_map(|_| bytes_of_sums(&sums, interval, Estimator::CountOfSuccesses, || rng::next(&mut state)).ok())
            .sum::<f64>()
            / f64::from(runs);
        let further = (sums.sampled_bytes - sums.offset_sum - 4) as f64;
        let sigma = (further * 1_000.0 / f64::from(runs)).sqrt();
        assert!((mean - 4_000.0 - further).abs() < 5.0 * sigma, "{mean}");
        sums.record(2_000, 2_000, 0, interval);
        assert_eq!(bytes_of_sums(&sums, interval, Estimator::SizeOverInterval, || 0), Err(SIZES_ON_BOTH_SIDES));
        assert_eq!(bytes_of_sums(&SampleSums::default(), interval, Estimator::Offset, || 0), Ok(0.0));
    }

    /// Seeded: 4,000 runs of a stack of mixed sizes with 4.2 expected samples. The intervals cover the true value at
    /// least as often as they claim, minus 4 standard errors (of 0.35 % each).
    #[test]
    fn estimators_have_intervals_of_their_own() {
        let (interval, confidence, runs) = (1_000, 0.95, 4_000);
        let constants = sampler_ebpf::constants::draw_constants(interval).expect("in range");
        let sizes: Vec<u64> = (0..40).map(|i| 1 + i * 37 % 210).collect();
        let truth = sizes.iter().sum::<u64>() as f64;
        let (mut state, mut completion) = (rng::seed(7, 0), rng::seed(8, 0));
        let mut held = [0; 2];
        for _ in 0..runs {
            let mut remaining = draw(rng::next(&mut state), &constants);
            let mut sums = SampleSums::default();
            for &size in &sizes {
                if let Some(offset) = step(&mut remaining, size) {
                    remaining = draw(rng::next(&mut state), &constants);
                    sums.record(size, size, offset, interval);
                }
            }
            for (held, estimator) in held.iter_mut().zip([Estimator::CountOfSuccesses, Estimator::Offset]) {
                let figure =
                    bytes_of_sums(&sums, interval, estimator, || rng::next(&mut completion)).expect("a figure");
                let ends =
                    interval_of_sums(&Part::new(interval, &sums), figure, estimator, confidence).expect("an interval");
                assert!(ends.low <= figure + 1.0 && figure <= ends.high, "{figure} {ends:?}");
                *held += i32::from(ends.low <= truth && truth <= ends.high);
            }
        }
        for held in held {
            assert!(f64::from(held) / f64::from(runs) > confidence - 4.0 * 0.0035, "{held}");
        }
    }

    /// The gamma limit is close to the exact quantiles where it takes over, and an absurd number of samples takes no
    /// time.
    #[test]
    fn many_samples_have_the_limits_interval() {
        let of = |samples: u64| {
            let sums = SampleSums { samples, sampled_bytes: samples * 8, largest_bytes: 8, ..SampleSums::default() };
            interval_of_sums(&Part::new(524_288, &sums), 0.0, Estimator::Offset, 0.95).expect("an interval")
        };
        let exact = of(MOST_EXACT);
        let limit = from_offsets(MOST_EXACT, 8e5, 8e5, 524_288, 0.95);
        let width = exact.high - exact.low;
        assert!((exact.low - limit.low).abs() < 2e-4 * width && (exact.high - limit.high).abs() < 2e-4 * width);
        assert!(of(1 << 48).high > of(1 << 40).high);
    }

    #[test]
    fn where_an_estimator_has_no_interval_it_says_why() {
        let mut sums = SampleSums::default();
        sums.record(5_000, 5_000, 10, 1_000);
        let of = |estimator, interval| interval_of_sums(&Part::new(interval, &sums), sums.bytes, estimator, 0.95);
        assert_eq!(of(Estimator::SizeOverInterval, 1_000), Err(BIASED));
        assert_eq!(of(Estimator::CountOfSuccesses, 1_000), Err(TAKEN_AS_THEY_ARE));
        assert_eq!(of(Estimator::SizeOverInterval, 1), Ok(Interval { low: 5_000.0, high: 5_000.0 }));
        let nothing = SampleSums::default();
        let unseen = interval_of_sums(&Part::new(1_000, &nothing), 0.0, Estimator::Offset, 0.95).expect("bounded");
        assert!(unseen.low == 0.0 && (unseen.high / 3_688.0 - 1.0).abs() < 1e-3, "{unseen:?}");
    }

    #[test]
    fn worked_example() {
        let interval = negative_binomial_interval(8, 10_908, 102_400, 0.95, Window::AtSample);
        assert_eq!((interval.low, interval.high), (364_574.0, 1_487_778.0));
        assert_eq!(offset_estimate(8, 10_908, 102_400), 830_100.0);
    }

    /// Seeded: 3,000 windows of five threads of unequal length. The interval covers the true value at least as often as
    /// it claims, minus 4 standard errors of 3,000 runs (0.4 % each); with a closed window it would not.
    #[test]
    fn threads_laid_end_to_end_are_covered() {
        let (interval, confidence, runs) = (1_000, 0.95, 3_000);
        let constants = sampler_ebpf::constants::draw_constants(interval).expect("in range");
        let mut state = rng::seed(6, 0);
        let (mut open, mut closed, mut truth) = (0, 0, 0);
        for _ in 0..runs {
            let mut sums = SampleSums::default();
            truth = 0;
            for thread in 1..=5 {
                let mut remaining = draw(rng::next(&mut state), &constants);
                for i in 0..40 * thread {
                    let size = 1 + i * 7 % 30;
                    truth += size;
                    if let Some(offset) = step(&mut remaining, size) {
                        remaining = draw(rng::next(&mut state), &constants);
                        sums.record(size, size, offset, interval);
                    }
                }
            }
            let holds = |ends: Interval| i32::from(ends.low <= truth as f64 && truth as f64 <= ends.high);
            open += holds(
                interval_of_sums(&Part::new(interval, &sums), 0.0, Estimator::Offset, confidence).expect("an interval"),
            );
            let (samples, unskipped) = (sums.sized_samples(), sums.unskipped().expect("offsets"));
            closed += holds(negative_binomial_interval(samples, unskipped, interval, confidence, Window::AtSample));
        }
        assert!(truth > 5_000);
        let (open, closed) = (f64::from(open) / f64::from(runs), f64::from(closed) / f64::from(runs));
        let allowed = confidence - 4.0 * 0.004;
        assert!(open > allowed && closed < allowed, "{open} {closed}");
    }

    #[test]
    fn by_hand() {
        // One geometric waiting time with p = 1/2 has the variance q/p² = 2.
        assert_eq!((offset_variance(1, 2), offset_variance(3, 2), offset_variance(5, 1)), (2.0, 6.0, 0.0));
        // −R ln u for the smallest u = 2⁻⁶⁴: 64 ln 2 sampling intervals.
        let draws = largest_draw(2f64.powi(-64), 1 << 26) / 2f64.powi(26);
        assert!((draws - 64.0 * std::f64::consts::LN_2).abs() < 1e-6, "{draws}");
    }
}
