//! Rounds estimates to integers while preserving their sum.

/// Rounds each value down or up so that the results add up to the rounded sum of the values (largest-remainder method).
/// Each result is less than 1 away from its value. Ties are resolved in input order, so the result is deterministic.
/// Values that are not finite count as 0.
pub fn largest_remainder(values: &[f64]) -> Vec<i64> {
    let finite = |value: f64| if value.is_finite() { value } else { 0.0 };
    let mut rounded: Vec<i64> = values.iter().map(|&value| finite(value).floor() as i64).collect();
    let total = total(values);
    let floors: i64 = rounded.iter().fold(0, |sum, &floor| sum.saturating_add(floor));
    let missing = usize::try_from(total.saturating_sub(floors)).unwrap_or(0).min(values.len());
    if missing == 0 {
        return rounded;
    }
    let remainder = |index: usize| {
        let value = finite(values[index]);
        value - value.floor()
    };
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| remainder(b).total_cmp(&remainder(a)).then(a.cmp(&b)));
    order[..missing].iter().for_each(|&index| rounded[index] = rounded[index].saturating_add(1));
    rounded
}

/// The rounded sum of the values, to which the results of [`largest_remainder`] add up.
pub fn total(values: &[f64]) -> i64 {
    values.iter().filter(|value| value.is_finite()).sum::<f64>().round() as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thirds_add_up() {
        assert_eq!(largest_remainder(&[1.0 / 3.0; 3]), [1, 0, 0]);
        assert_eq!(largest_remainder(&[0.5, 0.5]), [1, 0]);
        assert_eq!(largest_remainder(&[2.2, 3.9, 0.4]), [2, 4, 1]);
        assert_eq!(largest_remainder(&[]), Vec::<i64>::new());
    }

    #[test]
    fn hostile_values_do_not_overflow() {
        assert_eq!(largest_remainder(&[f64::NAN, f64::INFINITY, 2.0]), [0, 0, 2]);
        assert_eq!(largest_remainder(&[1e300])[0], i64::MAX);
        assert_eq!(largest_remainder(&[-1e300, 1e300, 0.7]).len(), 3);
    }

    /// Pseudo-random values of very different sizes: each moves by less than one, and the sum is the rounded sum.
    #[test]
    fn any_values_keep_their_sum() {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        for length in [1usize, 2, 10, 1000] {
            let values: Vec<f64> = (0..length)
                .map(|_| (next() % 1_000_000_007) as f64 / [1.0, 3.0, 977.0][(next() % 3) as usize])
                .collect();
            let rounded = largest_remainder(&values);
            assert_eq!(rounded.iter().sum::<i64>(), total(&values));
            assert!(values.iter().zip(&rounded).all(|(value, &whole)| (value - whole as f64).abs() < 1.0));
        }
    }
}
