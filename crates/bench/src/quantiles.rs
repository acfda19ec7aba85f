//! Medians and quartiles of repeated measurements.

/// Quantile `q` (0 to 1) of a sample, interpolated linearly; NaN if it is empty.
#[must_use]
pub fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n => {
            let at = q * (n - 1) as f64;
            let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
            low + (high - low) * at.fract()
        }
    }
}

/// The median of a sample.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// Median and quartiles as text: `1.093 [1.081, 1.102]`.
#[must_use]
pub fn spread(values: &[f64]) -> String {
    format!("{:.3} [{:.3}, {:.3}]", median(values), quantile(values, 0.25), quantile(values, 0.75))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_interpolated() {
        let values = [4.0, 1.0, 3.0, 2.0];
        assert_eq!([0.0, 0.5, 1.0].map(|q| quantile(&values, q)), [1.0, 2.5, 4.0]);
        assert_eq!(quantile(&values, 0.25), 1.75);
        assert_eq!((median(&[7.0]), quantile(&[7.0], 0.9)), (7.0, 7.0));
        assert!(median(&[]).is_nan());
        assert_eq!(spread(&values), "2.500 [1.750, 3.250]");
    }
}
