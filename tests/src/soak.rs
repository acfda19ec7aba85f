//! The arithmetic of `cargo xtask soak`: a slope with its error, and the drift of estimates from exact counts.

/// A straight line through points.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Line {
    /// Growth per unit of the first coordinate.
    pub slope: f64,
    /// Standard error of the slope.
    pub error: f64,
}

impl Line {
    /// Ordinary least squares. Successive samples of memory size are correlated, so the standard error is widened by
    /// √((1+ρ)/(1−ρ)), where ρ is the correlation of each residual with the next, if positive. The effective number of
    /// n samples is n(1−ρ)/(1+ρ) (Bartlett 1946; Santer et al. 2000, eq. 6). Returns `None` for fewer than four points,
    /// or for a single time.
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
    /// The counted total.
    pub exact: f64,
    /// The estimated total.
    pub estimated: f64,
    /// σ of the estimate.
    pub sigma: f64,
}

/// How estimates drift from exact counts, in σ.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drift {
    /// (estimated − exact)/σ of the last totals.
    pub at_end: f64,
    /// Number of increments between moments.
    pub increments: usize,
    /// Mean of the increments' (estimated − exact)/σ. Its standard error is 1/√n if nothing drifts.
    pub mean: f64,
    /// Root mean square of the same: about 1 if σ is right.
    pub spread: f64,
}

impl Drift {
    /// Drift of totals in time order. Samples of disjoint times are independent, so the variance of an increment is the
    /// difference of the variances. Returns `None` if nothing was sampled.
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
