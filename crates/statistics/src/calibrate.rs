//! Calibration of estimates by an exact total, and a self-check of estimates against it.

use super::interval;

/// Two-sided probability beyond five standard deviations of a normal variable.
const FIVE_SIGMA: f64 = 5.733e-7;

/// The estimate of one part of a total, with its estimated variance.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimated {
    /// T_g: the estimate.
    pub estimate: f64,
    /// V_g: its estimated variance.
    pub variance: f64,
}

/// Adjusts the estimates of `parts` so that they add up to `exact` (B): T_g + (V_g / V_all)(B − T_all), a regression
/// estimator with the exact total as control variate.
///
/// The ratio estimator T_g · B / T_all would also scale parts that are already exact. If no part has any variance, the
/// estimates are returned unchanged.
pub fn by_regression(parts: &[Estimated], exact: f64) -> Vec<f64> {
    let total: f64 = parts.iter().map(|part| part.estimate).sum();
    let variance: f64 = parts.iter().map(|part| part.variance).sum();
    let per_variance = if variance > 0.0 { (exact - total) / variance } else { 0.0 };
    parts.iter().map(|part| part.estimate + part.variance * per_variance).collect()
}

/// How an estimated total compares with the exact one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SelfCheck {
    /// (exact − estimate) / √variance; `None` without variance. With few samples, or with samples so large that almost
    /// none can be missed next to unsampled small allocations, this can exceed 5 although the exact total is inside the
    /// five-sigma interval. The variance is then too small to judge by, and `z` is measured in fifths of that side of
    /// the interval.
    pub z: Option<f64>,
    /// Whether chance cannot explain the difference, so samples were lost or something is broken. True if |z| > 5 and
    /// the exact total is outside the five-sigma interval, which allows for the skewness of few samples.
    pub alarming: bool,
}

/// Compares an estimated total, its variance and its five-sigma interval with the exact total.
pub fn self_check(estimate: f64, variance: f64, five_sigma: interval::Interval, exact: f64) -> SelfCheck {
    let difference = exact - estimate;
    let z = (variance > 0.0).then(|| difference / variance.sqrt());
    // Sums of floating-point numbers are not exact to the last byte.
    let slack = 0.5 + 1e-9 * exact.abs();
    let outside = exact < five_sigma.low - slack || exact > five_sigma.high + slack;
    let side = if difference > 0.0 { five_sigma.high - estimate } else { estimate - five_sigma.low };
    let z = match z {
        Some(z) if z.abs() > 5.0 && !outside => Some(5.0 * difference / side.max(difference.abs())),
        z => z,
    };
    SelfCheck { z, alarming: outside && z.is_none_or(|z| z.abs() > 5.0) }
}

/// Confidence level of the interval that [`self_check`] expects: five standard deviations, two-sided.
pub const SELF_CHECK_CONFIDENCE: f64 = 1.0 - FIVE_SIGMA;

#[cfg(test)]
mod tests {
    use super::super::interval::Sampled;
    use super::*;

    #[test]
    fn sums_equal_the_exact_total() {
        let parts = [
            Estimated { estimate: 100.0, variance: 30.0 },
            Estimated { estimate: 50.0, variance: 0.0 },
            Estimated { estimate: 10.0, variance: 10.0 },
        ];
        let calibrated = by_regression(&parts, 180.0);
        assert_eq!(calibrated, [115.0, 50.0, 15.0]);
        assert_eq!(by_regression(&parts[1..2], 60.0), [50.0]);
    }

    /// The five-sigma interval of samples drawn with one sampling interval.
    fn of_one_interval(sampled: Sampled, variance: f64, interval: u64, exact: f64) -> SelfCheck {
        let range = interval::from_sizes(sampled, interval, 1.0 - FIVE_SIGMA);
        self_check(sampled.estimate, variance, range, exact)
    }

    #[test]
    fn alarms() {
        let r = 1_000u64;
        let seen = |s: u64| Sampled { samples: s, sum: s as f64, estimate: (s * r) as f64 };
        // One sample where six were expected: 5.5 standard deviations, yet the probability is 1 %. There is no alarm,
        // and z stays below 5.
        let check = of_one_interval(seen(1), 1e6, r, 6_500.0);
        assert!(check.z.is_some_and(|z| 0.0 < z && z < 5.0) && !check.alarming, "{check:?}");
        // Large blocks that are sampled almost surely have almost no variance; the small ones next to them were not
        // sampled.
        let large = Sampled { samples: 200, sum: 92.8e6, estimate: 92.8e6 };
        let check = of_one_interval(large, 1e4, 524_288, 93.1e6);
        assert!(check.z.is_some_and(|z| 0.0 < z && z < 2.0) && !check.alarming, "{check:?}");
        let check = of_one_interval(seen(10_000), 1e10, r, 10.6e6);
        assert!(check.alarming, "{check:?}");
        assert!(!of_one_interval(seen(10_000), 1e10, r, 10.3e6).alarming);
        assert!(!of_one_interval(seen(0), 0.0, r, 10_000.0).alarming);
        assert!(of_one_interval(seen(0), 0.0, r, 20_000.0).alarming);
        // With everything sampled, anything missing is an alarm.
        let all = Sampled { samples: 10, sum: 1e6, estimate: 1e6 };
        assert!(!of_one_interval(all, 0.0, 1, 1e6).alarming);
        assert!(of_one_interval(all, 0.0, 1, 1e6 + 2_000.0).alarming);
    }
}
