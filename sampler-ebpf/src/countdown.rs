//! The countdown: which allocations are sampled.
//!
//! A thread counts trials down from a geometric draw X. An allocation of n trials is sampled if it reaches the X-th
//! trial, that is, with probability 1 − (1 − 1/R)^n regardless of earlier allocations. The remaining trials of a
//! sampled allocation are skipped, and the caller draws afresh for the next one. Nothing is carried over, which keeps
//! the estimates unbiased.

/// Counts `trials` down from `remaining`, which is at least 1 (the trial that succeeds).
///
/// If the allocation is sampled, returns the offset: the number of failed trials of this allocation before the
/// successful one. `remaining` must then be drawn anew. If it is not sampled, returns `None`.
#[inline(always)]
pub fn step(remaining: &mut u64, trials: u64) -> Option<u64> {
    if trials < *remaining {
        *remaining -= trials;
        return None;
    }
    Some(remaining.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometric::{DrawConstants, draw};
    use crate::rng;

    /// R = 100, constants from the independent oracle.
    const HUNDRED: DrawConstants = DrawConstants { interval: 100, multiplier: 9_939_273_447_846_418_581, shift: 57 };

    fn probability(trials: u64) -> f64 {
        -(trials as f64 * (-1.0f64 / 100.0).ln_1p()).exp_m1()
    }

    /// The sampled share of each size in a repeated cycle of (size, how often), and the mean offset of the samples.
    fn shares(cycle: &[(u64, u64)], cycles: u64, seed: u64) -> Vec<(f64, f64)> {
        let mut state = rng::seed(seed, 0);
        let mut remaining = draw(rng::next(&mut state), &HUNDRED);
        let mut sampled = vec![(0u64, 0u64); cycle.len()];
        for _ in 0..cycles {
            for (class, &(size, times)) in cycle.iter().enumerate() {
                for _ in 0..times {
                    if let Some(offset) = step(&mut remaining, size) {
                        assert!(offset < size);
                        sampled[class].0 += 1;
                        sampled[class].1 += offset;
                        remaining = draw(rng::next(&mut state), &HUNDRED);
                    }
                }
            }
        }
        sampled
            .iter()
            .zip(cycle)
            .map(|(&(n, offsets), &(_, times))| (n as f64 / (cycles * times) as f64, offsets as f64 / n.max(1) as f64))
            .collect()
    }

    /// Models a sampler that carries the overshoot into the next draw: record once, then S += Exp(R).
    fn carrying_share_of_small(cycle: &[(u64, u64)], cycles: u64) -> f64 {
        let mut state = rng::seed(3, 0);
        let mut exponential = || -100.0 * ((rng::next(&mut state) as f64 + 1.0) / 2f64.powi(64)).ln();
        let mut left = exponential();
        let (mut small, mut seen) = (0u64, 0u64);
        for _ in 0..cycles {
            for &(size, times) in cycle {
                for _ in 0..times {
                    left -= size as f64;
                    let sampled = left < 0.0;
                    if sampled {
                        left += exponential();
                    }
                    if size == 1 {
                        seen += 1;
                        small += u64::from(sampled);
                    }
                }
            }
        }
        small as f64 / seen as f64
    }

    /// Seeded. Each share is within 4.5 σ of its probability (false alarm 7e-6 each, were it not seeded).
    /// The periods 100 and 50 are those that a fixed stride of R bytes would miss or always hit.
    #[test]
    fn order_does_not_matter() {
        let cycles = 100_000;
        for cycle in
            [&[(10_000, 1), (1, 100)][..], &[(99, 1), (1, 1)], &[(50, 1), (25, 2)], &[(1, 7), (300, 1), (17, 3)]]
        {
            for (&(size, times), (share, _)) in cycle.iter().zip(shares(cycle, cycles, 11)) {
                let p = probability(size);
                let sigma = (p * (1.0 - p) / (cycles * times) as f64).sqrt();
                assert!((share - p).abs() <= 4.5 * sigma + 1e-12, "{cycle:?} {size}: {share}, expected {p}");
            }
        }
    }

    /// Runs the same cycles through the sampler that carries its overshoot. It over-samples the small allocations 33
    /// and almost 100 times, which shows that the test above can fail.
    #[test]
    fn carrying_the_overshoot_fails() {
        assert!(carrying_share_of_small(&[(99, 1), (1, 1)], 100_000) > 30.0 * probability(1));
        assert!(carrying_share_of_small(&[(10_000, 1), (1, 100)], 2_000) > 95.0 * probability(1));
    }

    /// E[offset | sampled, n] = (R − 1) − n (1 − P)/P: the mean that the offset estimator relies on.
    /// Standard deviation of an offset is below n/√12 + 1; 5 σ, seeded.
    #[test]
    fn offsets_have_the_truncated_geometric_mean() {
        let cycles = 200_000;
        for (size, (share, mean)) in [30u64, 200, 1].into_iter().zip(shares(&[(30, 1), (200, 1), (1, 1)], cycles, 5)) {
            let p = probability(size);
            let expected = 99.0 - size as f64 * (1.0 - p) / p;
            let sigma = (size as f64 / 12f64.sqrt() + 1.0) / (share * cycles as f64).sqrt();
            assert!((mean - expected).abs() < 5.0 * sigma, "{size}: {mean}, expected {expected}");
        }
    }

    #[test]
    fn a_trial_less_than_needed_is_not_enough() {
        let mut remaining = 10;
        assert_eq!(step(&mut remaining, 9), None);
        assert_eq!(remaining, 1);
        assert_eq!(step(&mut remaining, 0), None);
        assert_eq!(step(&mut remaining, 5), Some(0));
        remaining = 5;
        assert_eq!(step(&mut remaining, 5), Some(4));
        remaining = u64::MAX;
        assert_eq!(step(&mut remaining, 1 << 47), None);
    }
}
