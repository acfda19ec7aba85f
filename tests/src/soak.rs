//! The arithmetic of `cargo xtask soak`: a slope with its error, and the drift of estimates from exact counts.

/// A straight line through points.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Line {
    /// Growth per unit of the first coordinate.
    pub slope: f64,
    /// Its standard error.
    pub error: f64,
}

impl Line {
    /// Ordinary least squares. Samples of a memory's size follow each other closely, so the standard error is widened by
    /// √((1+ρ)/(1−ρ)), with the residuals' correlation ρ of each with the next, if positive: what that leaves of n samples is
    /// n(1−ρ)/(1+ρ) (Bartlett 1946; Santer et al. 2000, eq. 6). `None` of fewer than four points, or of a single time.
    pub fn through(points: &[(f64, f64)]) -> Option<Self> {
        let n = points.len() as f64;
        if points.len() < 4 {
            return None;
        }
        let mean = |of: &dyn Fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / n;
        let (x, y) = (mean(&|point| point.0), mean(&|point| point.1));
        let spread: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
        if spread <= 0.0 {
            return None;
        }
        let slope = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum::<f64>() / spread;
        let residuals: Vec<f64> = points.iter().map(|point| point.1 - y - slope * (point.0 - x)).collect();
        let squares: f64 = residuals.iter().map(|residual| residual * residual).sum();
        let products: f64 = residuals.windows(2).map(|pair| pair[0] * pair[1]).sum();
        let correlation = if squares > 0.0 { (products / squares).clamp(0.0, 0.99) } else { 0.0 };
        let widened = (1.0 + correlation) / (1.0 - correlation);
        Some(Self { slope, error: (squares / (n - 2.0) / spread * widened).sqrt() })
    }
}

/// A total at some moment: exact, estimated, and the estimate's standard error.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    /// Counted.
    pub exact: f64,
    /// Estimated.
    pub estimated: f64,
    /// σ of the estimate.
    pub sigma: f64,
}

/// How estimates drift from exact counts, in σ.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drift {
    /// (estimated − exact)/σ of the last totals.
    pub at_end: f64,
    /// Increments between moments.
    pub increments: usize,
    /// Mean of the increments' (estimated − exact)/σ; its standard error is 1/√n if nothing drifts.
    pub mean: f64,
    /// Root of their mean square: about 1 if σ is right.
    pub spread: f64,
}

impl Drift {
    /// Of totals in the order of time. Samples of disjoint times are independent, so the variance of an increment is the
    /// difference of the variances. `None` if nothing was sampled.
    pub fn of(totals: &[Totals]) -> Option<Self> {
        let last = totals.last().filter(|last| last.sigma > 0.0)?;
        let increment = |pair: &[Totals]| {
            let variance = pair[1].sigma.powi(2) - pair[0].sigma.powi(2);
            let difference = (pair[1].estimated - pair[1].exact) - (pair[0].estimated - pair[0].exact);
            (variance > 0.0).then(|| difference / variance.sqrt())
        };
        let found: Vec<f64> = totals.windows(2).filter_map(increment).collect();
        let n = found.len().max(1) as f64;
        Some(Self {
            at_end: (last.estimated - last.exact) / last.sigma,
            increments: found.len(),
            mean: found.iter().sum::<f64>() / n,
            spread: (found.iter().map(|z| z * z).sum::<f64>() / n).sqrt(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Residuals 1, −1, −1, 1 around 3 + 2 x: by hand, the squares are 4, two degrees of freedom, spread 5, so that the error
    /// is √(4/2/5) without correlation; products −1 + 1 − 1 are negative.
    #[test]
    fn a_line_has_the_slope_and_error_of_the_textbook() {
        let line = Line::through(&[(0.0, 4.0), (1.0, 4.0), (2.0, 6.0), (3.0, 10.0)]).expect("four points");
        assert!((line.slope - 2.0).abs() < 1e-12 && (line.error - 0.4_f64.sqrt()).abs() < 1e-12, "{line:?}");
        assert_eq!(Line::through(&[(0.0, 1.0); 3]), None);
        assert_eq!(Line::through(&[(0.0, 1.0); 5]), None);
    }

    /// Residuals that stay on one side for long say less than as many independent ones.
    #[test]
    fn samples_that_follow_each_other_have_a_larger_error() {
        let points = |period: usize| -> Vec<(f64, f64)> {
            (0..64).map(|i| (i as f64, if (i / period).is_multiple_of(2) { 1.0 } else { -1.0 })).collect()
        };
        let (quick, slow) = (Line::through(&points(1)).expect("points"), Line::through(&points(8)).expect("points"));
        assert!(slow.error > 2.0 * quick.error, "{quick:?}, {slow:?}");
    }

    #[test]
    fn increments_are_in_their_own_sigma() {
        let at = |exact: f64, estimated: f64, sigma: f64| Totals { exact, estimated, sigma };
        let drift = Drift::of(&[at(10.0, 13.0, 3.0), at(20.0, 27.0, 5.0), at(30.0, 24.0, 13.0)]).expect("sampled");
        // (7 − 3)/4 and (−6 − 7)/12.
        assert_eq!(drift.increments, 2);
        assert!((drift.at_end + 6.0 / 13.0).abs() < 1e-12, "{drift:?}");
        assert!((drift.mean - (1.0 - 13.0 / 12.0) / 2.0).abs() < 1e-12, "{drift:?}");
        assert_eq!(Drift::of(&[at(1.0, 1.0, 0.0)]), None);
    }
}
