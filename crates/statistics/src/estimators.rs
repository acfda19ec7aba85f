//! Other published estimators, computed from the same samples for comparison with Horvitz–Thompson.

use super::binomial;
use super::interval::Interval;
use super::weight::inclusion;

/// A rule that estimates bytes from samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Estimator {
    /// Weight 1/(1 − qⁿ) for each sample: unbiased, with the least variance of these.
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
///
/// Each thread has a countdown of its own, and the observation window of each ends while a countdown is running. But the
/// trials of all threads are independent and identically distributed, so the windows can be laid end to end: an
/// unfinished wait continues in the next thread, s and u add up, and one open end remains.
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
    use crate::sums::SampleSums;
    use sampler_ebpf::{countdown::step, geometric::draw, rng};

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
            let (samples, unskipped) = (sums.sized_samples(), sums.unskipped().expect("offsets"));
            let holds = |window| {
                let ends = negative_binomial_interval(samples, unskipped, interval, confidence, window);
                i32::from(ends.low <= truth as f64 && truth as f64 <= ends.high)
            };
            open += holds(Window::Open);
            closed += holds(Window::AtSample);
        }
        assert!(truth > 5_000);
        let (open, closed) = (f64::from(open) / f64::from(runs), f64::from(closed) / f64::from(runs));
        let allowed = confidence - 4.0 * 0.004;
        assert!(open > allowed && closed < allowed, "{open} {closed}");
    }
}
