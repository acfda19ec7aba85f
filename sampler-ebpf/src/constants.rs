//! The constants of the BPF side's geometric draw, computed exactly in integers.

use crate::geometric::DrawConstants;

/// Binary places of the series D below.
const PLACES: u32 = 126;
/// Binary places of the ratio of two such series.
const RATIO_PLACES: u32 = 80;
/// Largest sampling interval that constants exist for.
pub const LARGEST_INTERVAL: u64 = 1 << 40;
/// Largest sampling interval of a recording (`heapbpf_statistics::plan::LARGEST_INTERVAL`).
pub const LARGEST_CHOSEN_INTERVAL: u64 = 64 << 20;

/// Constants for the sampling interval `interval` (R, in trials): C = round(c · 2^shift) with 2^63 ≤ C < 2^64, where
/// c = ln 2 / −ln(1 − 1/R). `None` above [`LARGEST_INTERVAL`]; 0 and 1 need no constants.
///
/// With n = 2R − 1: −ln(1 − 1/R) = 2 artanh(1/n) = (2/n) D(n), D(n) = 1 + n⁻²/3 + n⁻⁴/5 + …, and ln 2 = (2/3) D(3).
/// So c = n D(3) / (3 D(n)), a quotient of two numbers near 1.
pub fn draw_constants(interval: u64) -> Option<DrawConstants> {
    if interval > LARGEST_INTERVAL {
        return None;
    }
    if interval < 2 {
        return Some(DrawConstants { interval, multiplier: 0, shift: 0 });
    }
    let n = 2 * u128::from(interval) - 1;
    let c = quotient(artanh_series(3), artanh_series(n)) * n / 3;
    let excess = u128::BITS - c.leading_zeros() - u64::BITS;
    let rounded = ((c >> (excess - 1)) + 1) >> 1;
    // Rounding up may carry into a 65th bit.
    let carry = (rounded >> u64::BITS) as u32;
    Some(DrawConstants {
        interval,
        multiplier: (rounded >> carry) as u64,
        shift: u64::from(RATIO_PLACES - excess - carry),
    })
}

/// D(n) = Σ n^(−2k) / (2k + 1), in [`PLACES`] binary places.
fn artanh_series(n: u128) -> u128 {
    let (mut power, mut sum, mut divisor) = (1u128 << PLACES, 0, 1);
    while power > 0 {
        sum += power / divisor;
        power /= n * n;
        divisor += 2;
    }
    sum
}

/// `a / b` for 1 ≤ a/b < 2, in [`RATIO_PLACES`] binary places, by long division.
fn quotient(a: u128, b: u128) -> u128 {
    let (mut quotient, mut rest) = (1u128, a - b);
    for _ in 0..RATIO_PLACES {
        rest <<= 1;
        quotient <<= 1;
        if rest >= b {
            rest -= b;
            quotient |= 1;
        }
    }
    quotient
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_constants() {
        // From the oracle with 50 digits of precision.
        for (interval, multiplier, shift) in [
            (2, 9_223_372_036_854_775_808, 63),
            (3, 15_767_458_641_338_505_533, 63),
            (524_288, 12_786_296_451_224_622_723, 45),
            (1 << 40, 12_786_308_645_196_841_120, 24),
        ] {
            assert_eq!(draw_constants(interval), Some(DrawConstants { interval, multiplier, shift }));
        }
        assert_eq!(draw_constants(1), Some(DrawConstants { interval: 1, multiplier: 0, shift: 0 }));
        assert_eq!(draw_constants((1 << 40) + 1), None);
    }

    #[test]
    fn agree_with_floating_point() {
        for interval in (2..2_000).chain((1..40).map(|e| (1 << e) + 1)) {
            let constants = draw_constants(interval).expect("in range");
            assert!(constants.multiplier >> 63 == 1 && (8..=63).contains(&constants.shift));
            let c = constants.multiplier as f64 / 2f64.powi(constants.shift as i32);
            let expected = -core::f64::consts::LN_2 / (-1.0 / interval as f64).ln_1p();
            assert!((c / expected - 1.0).abs() < 1e-15, "{interval}");
        }
    }
}
