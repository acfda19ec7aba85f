//! Medians and quartiles of what the rounds gave.

/// Quantile `q` of a sample.
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

/// Median.
pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// `1.093 [1.081, 1.102]`: median and quartiles.
pub fn spread(values: &[f64]) -> String {
    format!("{:.3} [{:.3}, {:.3}]", median(values), quantile(values, 0.25), quantile(values, 0.75))
}
