//! The geometric draw in integers: the number of trials until and including the next success.
//!
//! Uses inversion, `draw = ceil(ln u / ln(1 − 1/R))` with `u = (random + 1) / 2^64`, without floating point, division
//! or 128-bit products, none of which BPF has. −log2 u comes from its leading zeros, a table of 128 logarithms and a
//! cubic for the rest. A product with a constant that the daemon computes turns it into trials. `docs/sampling.md` has
//! the derivation and the measured errors (log2 to 1.3e-9).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::bits::leading_zeros;

/// Parameters of the draw for one sampling interval, computed by the daemon (`constants::draw_constants`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct DrawConstants {
    /// Sampling interval R: the mean number of trials between successes. 1 samples everything, 0 nothing.
    pub interval: u64,
    /// C = round(c · 2^shift), c = ln 2 / −ln(1 − 1/R), normalised to 2^63 ≤ C < 2^64. Not used if R < 2.
    pub multiplier: u64,
    /// Binary places of C: 8 to 63. Not used if R < 2.
    pub shift: u64,
}

/// Number of mantissa bits that select a table entry.
const TABLE_BITS: u32 = 7;
/// Number of entries per table.
pub const ENTRIES: usize = 1 << TABLE_BITS;
/// Binary places of logarithms.
const LOG_PLACES: u32 = 56;

/// round(2^56 · log2(1 + i/128)).
pub static LOGARITHMS: [u64; ENTRIES] = logarithms();
/// round(2^32 / (1 + i/128)); the first is 2^32, hence 64 bits.
pub static RECIPROCALS: [u64; ENTRIES] = reciprocals();

/// round(2^31 / ln 2).
pub const INVERSE_LN_2: u64 = 3_098_164_009;
/// round(2^32 / 3).
pub const ONE_THIRD: u64 = 1_431_655_765;

/// Trials until and including the next success, at least 1, for a uniform `random`.
///
/// At most ceil(64 c), which is 44.4 R. With R = 1 always 1; with R = 0 a number that no countdown reaches.
#[inline(always)]
pub fn draw(random: u64, constants: &DrawConstants) -> u64 {
    if constants.interval < 2 {
        return if constants.interval == 1 { 1 } else { u64::MAX };
    }
    let log = negative_log2(random);
    // The approximation may be slightly below zero where u is close to 1. That is the first trial too.
    if log <= 0 {
        return 1;
    }
    let (high, low) = wide_product(log as u64, constants.multiplier);
    let exact = (low == 0) as u64;
    (high.wrapping_sub(exact)).wrapping_shr(constants.shift.wrapping_sub(8) as u32).wrapping_add(1)
}

/// −log2((random + 1) / 2^64) in units of 2^-56: from 64 · 2^56 down to 0, or slightly below.
#[inline(always)]
fn negative_log2(random: u64) -> i64 {
    let value = random.wrapping_add(1);
    if value == 0 {
        return 0; // u = 1
    }
    let zeros = leading_zeros(value);
    // value = 2^(63 − zeros) · (1 + fraction / 2^63), fraction = index · 2^56 + rest
    let fraction = value.wrapping_shl(zeros) & (u64::MAX >> 1);
    let index = (fraction >> (63 - TABLE_BITS)) as usize & (ENTRIES - 1);
    let rest = (fraction & ((1 << (63 - TABLE_BITS)) - 1)) >> 24;
    // 1 + fraction = (1 + index/128) (1 + z), z < 1/128; ln(1 + z) = z − z²/2 + z³/3 in 39 binary places
    let z = rest.wrapping_mul(RECIPROCALS[index]) >> 32;
    let square = z.wrapping_mul(z) >> 32; // 46 places
    let cube = square.wrapping_mul(z) >> 32; // 53 places
    let ln = z.wrapping_sub(square >> 8).wrapping_add((cube.wrapping_mul(ONE_THIRD) >> 32) >> 14);
    let rest_log2 = ln.wrapping_mul(INVERSE_LN_2) >> (39 + 31 - LOG_PLACES);
    let whole = (zeros as u64 + 1) << LOG_PLACES;
    whole.wrapping_sub(LOGARITHMS[index]).wrapping_sub(rest_log2) as i64
}

/// The high and low half of a 128-bit product, from four 32-bit products.
#[inline(always)]
fn wide_product(a: u64, b: u64) -> (u64, u64) {
    const LOW: u64 = 0xffff_ffff;
    let (a_high, a_low, b_high, b_low) = (a >> 32, a & LOW, b >> 32, b & LOW);
    let low = a_low.wrapping_mul(b_low);
    let middle = a_high.wrapping_mul(b_low).wrapping_add(low >> 32);
    let other = a_low.wrapping_mul(b_high).wrapping_add(middle & LOW);
    let high = a_high.wrapping_mul(b_high).wrapping_add(middle >> 32).wrapping_add(other >> 32);
    (high, (other << 32) | (low & LOW))
}

/// The table of logarithms, computed with integers at compile time: log2(1 + i/128) = ln(1 + i/128) / ln 2.
const fn logarithms() -> [u64; ENTRIES] {
    let ln_2 = ln_one_plus(ENTRIES as u128);
    let mut table = [0; ENTRIES];
    let mut i = 1;
    while i < ENTRIES {
        // Long division, one binary place per step, and one more place to round.
        let (mut quotient, mut rest, mut place) = (0u64, ln_one_plus(i as u128), 0);
        while place <= LOG_PLACES {
            rest *= 2;
            quotient *= 2;
            if rest >= ln_2 {
                rest -= ln_2;
                quotient += 1;
            }
            place += 1;
        }
        table[i] = quotient.div_ceil(2);
        i += 1;
    }
    table
}

/// ln(1 + i/128) / 2 = artanh(i / (256 + i)) in 112 binary places, for i up to 128.
const fn ln_one_plus(i: u128) -> u128 {
    let base = 2 * ENTRIES as u128 + i;
    let mut power = (i << 112) / base;
    let (mut sum, mut k) = (0, 1);
    while power > 0 {
        sum += power / k;
        power = power * i * i / (base * base);
        k += 2;
    }
    sum
}

const fn reciprocals() -> [u64; ENTRIES] {
    let mut table = [0; ENTRIES];
    let mut i = 0;
    while i < ENTRIES {
        let base = (ENTRIES + i) as u64;
        table[i] = (((ENTRIES as u64) << 33) / base).div_ceil(2);
        i += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALF_MEBIBYTE: DrawConstants =
        DrawConstants { interval: 1 << 19, multiplier: 12_786_296_451_224_622_723, shift: 45 };
    const TEN: DrawConstants = DrawConstants { interval: 10, multiplier: 15_169_711_069_382_083_355, shift: 61 };

    #[test]
    fn tables_are_what_they_say() {
        for i in 0..ENTRIES {
            let x = 1.0 + i as f64 / 128.0;
            // f64 has 53 bits: the table must agree to that precision.
            assert!((LOGARITHMS[i] as f64 / 2f64.powi(56) - x.log2()).abs() < 4e-16, "{i}");
            assert_eq!(RECIPROCALS[i], (2f64.powi(32) / x).round() as u64, "{i}");
        }
        assert_eq!(INVERSE_LN_2, (2f64.powi(31) / core::f64::consts::LN_2).round() as u64);
        assert_eq!(ONE_THIRD, (2f64.powi(32) / 3.0).round() as u64);
    }

    #[test]
    fn wide_product_agrees_with_the_hardware() {
        let mut value = 1u64;
        for _ in 0..2_000 {
            value = value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (a, b) = (value >> (value & 63), value.rotate_left(17));
            let exact = u128::from(a) * u128::from(b);
            assert_eq!(wide_product(a, b), ((exact >> 64) as u64, exact as u64));
        }
    }

    #[test]
    fn ends_of_the_range() {
        assert_eq!(draw(0, &HALF_MEBIBYTE), 23_258_138);
        assert_eq!(draw(0, &TEN), 422);
        for constants in [HALF_MEBIBYTE, TEN] {
            // No underflow near u = 1, where the logarithm may come out slightly negative.
            for back in 0..4_096 {
                assert_eq!(draw(u64::MAX - back, &constants), 1);
            }
        }
        assert_eq!(draw(0, &DrawConstants { interval: 1, ..Default::default() }), 1);
        assert_eq!(draw(u64::MAX, &DrawConstants { interval: 1, ..Default::default() }), 1);
        assert_eq!(draw(7, &DrawConstants::default()), u64::MAX);
    }

    /// With evenly spaced `random`, the mean of the draws is R up to the quadrature error, without any chance.
    #[test]
    fn mean_and_distribution() {
        for (constants, interval) in [(HALF_MEBIBYTE, 524_288.0), (TEN, 10.0f64)] {
            let (points, step) = (1u64 << 20, 1u64 << 44);
            let ln_q = (-1.0 / interval).ln_1p();
            let mut sum = 0.0;
            for i in 0..points {
                let random = i * step + step / 2;
                let drawn = draw(random, &constants);
                sum += drawn as f64;
                let exact = (((random as f64 + 1.0) / 2f64.powi(64)).ln() / ln_q).ceil().max(1.0);
                assert!((drawn as f64 - exact).abs() <= 1.0 + 2e-9 * interval, "{random}: {drawn}, {exact}");
            }
            assert!((sum / points as f64 / interval - 1.0).abs() < 1e-5, "{}", sum / points as f64);
        }
    }
}
