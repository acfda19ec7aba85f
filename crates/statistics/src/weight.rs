//! Inclusion probabilities and weights (Horvitz–Thompson): how likely an allocation is to be sampled, and therefore how
//! many allocations a sample represents.

/// Inclusion probability and weight of an allocation of n trials under the sampling interval R.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Inclusion {
    /// P = 1 − qⁿ, q = 1 − 1/R.
    pub probability: f64,
    /// w = 1/P: the number of such allocations that one sample represents.
    pub weight: f64,
    /// w − 1 = qⁿ/(1 − qⁿ), to full relative accuracy; the subtraction would lose it.
    pub weight_minus_one: f64,
    /// n ln q, not positive; minus infinity for R = 1.
    log_miss: f64,
}

/// Inclusion probability and weight of an allocation of `trials` trials (n) under the sampling interval `interval` (R,
/// in trials). The relative error is below 1e-12 for n up to 2^47 and R up to 2^40.
///
/// `None` if it cannot be sampled, because there is no trial or R = 0.
pub fn inclusion(trials: u64, interval: u64) -> Option<Inclusion> {
    if trials == 0 || interval == 0 {
        return None;
    }
    if interval == 1 {
        return Some(Inclusion { probability: 1.0, weight: 1.0, weight_minus_one: 0.0, log_miss: f64::NEG_INFINITY });
    }
    Some(Inclusion::from_log_miss(trials as f64 * log_q(interval)))
}

/// Inclusion probability and weight in the Poisson limit, P = 1 − e^(−n/R), which jemalloc and `jeprof` use.
pub fn poisson_inclusion(trials: u64, interval: u64) -> Option<Inclusion> {
    (trials > 0 && interval > 0).then(|| Inclusion::from_log_miss(-(trials as f64) / interval as f64))
}

impl Inclusion {
    fn from_log_miss(log_miss: f64) -> Self {
        let probability = -log_miss.exp_m1();
        Self { probability, weight: 1.0 / probability, weight_minus_one: 1.0 / (-log_miss).exp_m1(), log_miss }
    }

    /// qⁿ: probability of not being sampled.
    pub fn miss_probability(&self) -> f64 {
        self.log_miss.exp()
    }

    /// The inclusion of a sample that is then examined with this probability (above 0, at most 1), whatever its size.
    #[must_use]
    pub fn thinned(self, probability: f64) -> Self {
        if probability >= 1.0 { self } else { Self::from_log_miss((-self.probability * probability).ln_1p()) }
    }

    /// `value²` (w − 1): the contribution of **every** allocation, sampled or not, to the true variance of an estimated
    /// total of `value`.
    pub fn true_variance(&self, value: f64) -> f64 {
        if self.log_miss < -600.0 {
            // qⁿ alone could underflow where value² qⁿ does not.
            let root = value * (self.log_miss / 2.0).exp();
            return root * root * self.weight;
        }
        value * value * self.weight_minus_one
    }

    /// `value²` w (w − 1): the contribution of a **sampled** allocation to the unbiased estimate of that variance.
    pub fn estimated_variance(&self, value: f64) -> f64 {
        self.true_variance(value) * self.weight
    }
}

/// ln q = ln(1 − 1/R) for R ≥ 2.
pub fn log_q(interval: u64) -> f64 {
    (-1.0 / interval as f64).ln_1p()
}

/// The number of trials that has this weight under `interval`, the inverse of [`inclusion`]. `None` if w ≤ 1 or R < 2.
pub fn trials_of_weight(weight: f64, interval: u64) -> Option<f64> {
    (weight > 1.0 && interval > 1).then(|| (-1.0 / weight).ln_1p() / log_q(interval))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_hand() {
        let half = inclusion(1, 2).expect("can be sampled");
        assert_eq!((half.probability, half.weight, half.weight_minus_one), (0.5, 2.0, 1.0));
        let three_quarters = inclusion(2, 2).expect("can be sampled");
        assert!((three_quarters.probability - 0.75).abs() < 1e-15);
        assert!((three_quarters.estimated_variance(3.0) - 9.0 * (4.0 / 3.0) * (1.0 / 3.0)).abs() < 1e-14);
        assert_eq!(inclusion(0, 2), None);
        assert_eq!(inclusion(0, 1), None);
        assert_eq!(inclusion(5, 0), None);
        let all = inclusion(7, 1).expect("can be sampled");
        assert_eq!((all.probability, all.true_variance(7.0), all.miss_probability()), (1.0, 0.0, 0.0));
    }

    #[test]
    fn trials_come_back() {
        for (trials, interval) in [(1, 2), (64, 524_288), (1 << 20, 1 << 19), (3, 1 << 40)] {
            let weight = inclusion(trials, interval).expect("can be sampled").weight;
            let back = trials_of_weight(weight, interval).expect("above 1");
            assert!((back / trials as f64 - 1.0).abs() < 1e-12);
        }
        assert_eq!((trials_of_weight(1.0, 100), trials_of_weight(2.0, 1)), (None, None));
    }

    /// The variance of a huge value that is hardly ever missed: q¹¹⁵⁵ alone is less than the smallest positive number.
    #[test]
    fn a_variance_does_not_underflow_with_its_factor() {
        let inclusion = inclusion(1_155, 2).expect("can be sampled");
        assert_eq!((inclusion.weight_minus_one, inclusion.miss_probability()), (0.0, 0.0));
        let logarithm = 200.0 * 10_f64.ln() - 1_155.0 * 2_f64.ln();
        assert!((inclusion.true_variance(1e100).ln() / logarithm - 1.0).abs() < 1e-12);
    }
}
