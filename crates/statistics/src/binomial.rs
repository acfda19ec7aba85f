//! The binomial and negative-binomial distributions for small success probabilities and many trials.
//!
//! Tails are sums of positive terms that start from Loader's saddle-point form of the largest one, as in
//! [`gamma`](super::gamma). That is accurate enough to find the exact integer quantile among 10^9 candidates;
//! differences of log-gamma functions are not.

use std::f64::consts::PI;

use super::gamma::{LARGE, Tail, deviance, large_tails, power_over_factorial, quantile, stirling_error};

/// P(B = k) of B ~ Binomial(n, p), for 0 < p < 1.
pub fn probability(n: u64, k: u64, p: f64) -> f64 {
    let (trials, hits) = (n as f64, k as f64);
    if k > n {
        return 0.0;
    }
    if k == 0 {
        return (trials * (-p).ln_1p()).exp();
    }
    if k == n {
        return (trials * p.ln()).exp();
    }
    let misses = (n - k) as f64;
    let exponent = stirling_error(n)
        - stirling_error(k)
        - stirling_error(n - k)
        - deviance(hits, trials * p)
        - deviance(misses, trials * (1.0 - p));
    exponent.exp() * (trials / (2.0 * PI * hits * misses)).sqrt()
}

/// P(B ≥ k) of B ~ Binomial(n, p), for 0 < p < 1. Where it is below one half it has full relative accuracy (a relative
/// error of 1e-6 for millions of successes).
pub fn at_least(n: u64, k: u64, p: f64) -> f64 {
    if k == 0 {
        return 1.0;
    }
    if k > n {
        return 0.0;
    }
    if k >= LARGE && n - k >= LARGE {
        let (trials, hits) = (n as f64, k as f64 - 0.5);
        let (mean, misses) = (trials * p, trials - hits);
        let deviance = (deviance(hits, mean) + deviance(misses, trials * (1.0 - p))) / (1.0 + 1.0 / (6.0 * trials));
        return large_tails(hits - mean, 1.0 / 6.0 - p / 3.0, deviance).1;
    }
    let odds = p / (1.0 - p);
    if (k as f64) > n as f64 * p {
        // Sum upwards from k: the ratio of neighbouring terms is (n − j)/(j + 1) · p/q.
        return sum_of_terms(probability(n, k, p), k, n, |j| (n - j) as f64 / (j + 1) as f64 * odds, 1);
    }
    // Downwards from k − 1.
    1.0 - sum_of_terms(probability(n, k - 1, p), k - 1, 0, |j| j as f64 / ((n - j + 1) as f64 * odds), -1)
}

/// first · (1 + r(j) + r(j) r(j ± 1) + …) until further terms are negligible or `end` is reached.
fn sum_of_terms(first: f64, start: u64, end: u64, ratio: impl Fn(u64) -> f64, step: i64) -> f64 {
    let (mut term, mut sum, mut j) = (1.0, 1.0, start);
    while j != end && term > sum * 1e-17 {
        term *= ratio(j);
        sum += term;
        j = j.wrapping_add_signed(step);
    }
    first * sum
}

/// E|B − np| of B ~ Binomial(n, p): 2 ν q P(B = ν), ν = ⌊np⌋ + 1 (De Moivre).
pub fn mean_deviation(n: u64, p: f64) -> f64 {
    let above = (n as f64 * p).floor() as u64 + 1;
    2.0 * above as f64 * (1.0 - p) * probability(n, above, p)
}

/// Negative binomial distribution function: the probability that at most `failures` trials fail before success number
/// `successes`, where each trial succeeds with probability 1/`interval`.
pub fn waiting_cdf(failures: u64, successes: u64, interval: u64) -> f64 {
    if interval <= 1 {
        return 1.0;
    }
    at_least(failures.saturating_add(successes), successes, 1.0 / interval as f64)
}

/// The smallest number of failed trials whose [`waiting_cdf`] reaches `probability` (0 < probability < 1).
pub fn waiting_quantile(probability: f64, successes: u64, interval: u64) -> u64 {
    if interval <= 1 || successes == 0 {
        return 0;
    }
    let reaches = |failures| waiting_cdf(failures, successes, interval) >= probability;
    // The gamma limit is off by no more than a few standard deviations of one geometric draw.
    let gamma = if probability < 0.5 {
        quantile(successes, Tail::Lower, probability)
    } else {
        quantile(successes, Tail::Upper, 1.0 - probability)
    };
    let guess = (gamma * interval as f64 - successes as f64).max(0.0) as u64;
    let mut step = successes.saturating_add(1);
    let (mut below, mut at) = (guess, guess);
    while below > 0 && reaches(below) {
        at = below;
        below = below.saturating_sub(step);
        step = step.saturating_mul(2);
    }
    if below == 0 && reaches(0) {
        return 0;
    }
    step = successes.saturating_add(1);
    while at < u64::MAX && !reaches(at) {
        below = at;
        at = at.saturating_add(step);
        step = step.saturating_mul(2);
    }
    while at - below > 1 {
        let middle = below + (at - below) / 2;
        if reaches(middle) {
            at = middle;
        } else {
            below = middle;
        }
    }
    at
}

/// Draws from Binomial(n, p) by adding up geometric waiting times, so the cost grows with n p. `random` returns 64
/// uniform random bits.
///
/// For n p above 1,000 it draws from the normal approximation, whose error is far below the standard deviation.
pub fn draw(n: u64, p: f64, mut random: impl FnMut() -> u64) -> u64 {
    if n == 0 || p <= 0.0 {
        return 0;
    }
    if p >= 1.0 {
        return n;
    }
    let mut uniform = || ((random() >> 11) as f64 + 1.0) / 2f64.powi(53);
    let mean = n as f64 * p;
    if mean > 1_000.0 {
        let normal = (-2.0 * uniform().ln()).sqrt() * (2.0 * PI * uniform()).cos();
        return (mean + normal * (mean * (1.0 - p)).sqrt()).round().clamp(0.0, n as f64) as u64;
    }
    let log_q = (-p).ln_1p();
    let (mut hits, mut used) = (0, 0.0);
    loop {
        used += (uniform().ln() / log_q).ceil().max(1.0);
        if used > n as f64 {
            return hits;
        }
        hits += 1;
    }
}

/// P(K = k) of K ~ Poisson(mean), the limit of the binomial for many trials.
pub fn poisson_probability(k: u64, mean: f64) -> f64 {
    power_over_factorial(k, mean)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_cases_by_hand() {
        assert!((probability(4, 2, 0.5) - 0.375).abs() < 1e-15);
        assert!((probability(3, 0, 0.25) - 0.421_875).abs() < 1e-15);
        assert!((probability(3, 3, 0.25) - 0.015_625).abs() < 1e-15);
        assert!((at_least(4, 3, 0.5) - 0.3125).abs() < 1e-15);
        assert!((at_least(4, 1, 0.5) - 0.9375).abs() < 1e-15);
        assert!((mean_deviation(2, 0.5) - 0.5).abs() < 1e-15);
        assert_eq!((at_least(5, 0, 0.1), at_least(5, 6, 0.1)), (1.0, 0.0));
    }

    #[test]
    fn quantile_is_the_smallest() {
        for (probability, successes, interval) in
            [(0.025, 1, 102_400), (0.975, 1, 102_400), (0.5, 40, 1_000), (0.001, 3, 2), (0.99, 10_000, 102_400)]
        {
            let at = waiting_quantile(probability, successes, interval);
            assert!(waiting_cdf(at, successes, interval) >= probability);
            assert!(at == 0 || waiting_cdf(at - 1, successes, interval) < probability);
        }
        // Published for s = 1 at R = 102,400: 2591 and 377738 are the largest values below the level.
        assert_eq!(waiting_quantile(0.025, 1, 102_400), 2_592);
        assert_eq!(waiting_quantile(0.975, 1, 102_400), 377_739);
    }

    /// The two forms agree where one takes over from the other, on both sides and far out in the tails.
    #[test]
    fn millions_of_successes_continue_the_few() {
        for p in [1e-6, 0.01, 0.5] {
            let k = LARGE;
            for sigmas in [-6.0, -2.0, -0.1, 0.1, 1.0, 3.0, 7.0] {
                let n = ((k as f64 - sigmas * (k as f64 * (1.0 - p)).sqrt()) / p) as u64;
                let large = at_least(n, k, p);
                let odds = p / (1.0 - p);
                let (whole, part) = if k as f64 > n as f64 * p {
                    (large, sum_of_terms(probability(n, k, p), k, n, |j| (n - j) as f64 / (j + 1) as f64 * odds, 1))
                } else {
                    let ratio = |j: u64| j as f64 / ((n - j + 1) as f64 * odds);
                    (1.0 - large, sum_of_terms(probability(n, k - 1, p), k - 1, 0, ratio, -1))
                };
                // 1 − large has lost its leading digits.
                assert!((whole - part).abs() <= 1e-6 * part + 1e-15, "{p} {sigmas}: {whole}, {part}");
            }
        }
    }

    /// Absurd numbers, which a file may contain, neither take long nor overflow.
    #[test]
    fn absurd_numbers_have_quantiles() {
        for (successes, interval) in [(1 << 48, 1 << 40), (u64::MAX, 2), (1 << 48, 3), (1 << 30, 1 << 20)] {
            let (low, high) =
                (waiting_quantile(0.025, successes, interval), waiting_quantile(0.975, successes, interval));
            assert!(low <= high, "{successes} {interval}: {low}, {high}");
        }
    }

    /// Seeded: the mean of 20,000 draws is within 5 σ / √20,000 of n p.
    #[test]
    fn draws_have_the_right_mean() {
        for (n, p) in [(100u64, 0.3f64), (1_000_000, 1e-5), (1_000_000, 0.01), (5, 0.9)] {
            let mut state = sampler_ebpf::rng::seed(9, n);
            let times = 20_000;
            let sum: u64 = (0..times).map(|_| draw(n, p, || sampler_ebpf::rng::next(&mut state))).sum();
            let (mean, sigma) = (n as f64 * p, (n as f64 * p * (1.0 - p) / times as f64).sqrt());
            assert!((sum as f64 / times as f64 - mean).abs() < 5.0 * sigma, "{n} {p}: {}", sum as f64 / times as f64);
        }
    }
}
