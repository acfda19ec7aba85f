//! The gamma distribution with integer shape and scale 1, the waiting time for k events: both tails and quantiles.
//!
//! Tails are sums of positive terms, so small tails keep their relative accuracy. The common factor is Loader's
//! saddle-point form ("Fast and accurate computation of binomial probabilities", 2000), which loses no digits for large
//! k.

use std::cell::RefCell;
use std::collections::HashMap;
use std::f64::consts::{PI, SQRT_2};

use statrs::function::erf::{erfc, erfc_inv};

/// Most quantiles in a thread's cache, which is cleared when it is full.
const CACHED_QUANTILES: usize = 1 << 16;

/// From this shape on the series needs thousands of terms, and Peizer and Pratt's approximation is accurate enough.
pub(super) const LARGE: u64 = 1 << 22;

/// Which end of the distribution a probability is measured from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tail {
    /// P(G ≤ x).
    Lower,
    /// P(G > x).
    Upper,
}

/// P(G ≤ x) and P(G > x) of G ~ Gamma(`shape`, 1). The smaller of the two has full relative accuracy (a relative error
/// of 1e-6 for shapes of four million and more).
pub fn tails(shape: u64, x: f64) -> (f64, f64) {
    if shape == 0 {
        return (1.0, 0.0);
    }
    if x <= 0.0 {
        return (0.0, 1.0);
    }
    let k = shape as f64;
    if shape >= LARGE {
        // P(G > x) = P(Poisson(x) ≤ k − 1)
        let (upper, lower) = large_tails(k - 0.5 - x, 1.0 / 6.0, deviance(k - 0.5, x));
        return (lower, upper);
    }
    let factor = power_over_factorial(shape, x);
    if x <= k {
        let lower = factor * lower_series(k, x, 1e-17);
        (lower, 1.0 - lower)
    } else {
        let upper = factor * upper_series(k, x, 1e-17);
        (1.0 - upper, upper)
    }
}

/// P(K ≤ k) and P(K > k) of a Poisson or binomial K with a large k, by Peizer and Pratt's normal approximation ("A
/// normal approximation for binomial, F, beta, and other common, related tail probabilities", 1968).
///
/// `distance` is k + ½ minus the mean, `shift` the correction that is added to it, `deviance` the deviance of k + ½
/// (summed over both outcomes for a binomial).
pub(super) fn large_tails(distance: f64, shift: f64, deviance: f64) -> (f64, f64) {
    // Within a millionth of a standard deviation of the mean the quotient has no digits left.
    let z = if deviance < 1e-12 { 0.0 } else { (distance + shift) / distance.abs() * (2.0 * deviance).sqrt() };
    (0.5 * erfc(-z / SQRT_2), 0.5 * erfc(z / SQRT_2))
}

/// 1 + x/(k+1) + x²/((k+1)(k+2)) + …; P(G ≤ x) is x^k e^−x / k! times this. For x ≤ k.
pub(super) fn lower_series(k: f64, x: f64, precision: f64) -> f64 {
    let (mut term, mut sum, mut j) = (1.0, 1.0, k);
    while term > sum * precision {
        j += 1.0;
        term *= x / j;
        sum += term;
    }
    sum
}

/// k/x (1 + (k−1)/x + (k−1)(k−2)/x² + …), a finite sum; P(G > x) is x^k e^−x / k! times this. For x ≥ k.
pub(super) fn upper_series(k: f64, x: f64, precision: f64) -> f64 {
    let inverse = 1.0 / x;
    let (mut term, mut sum, mut j) = (1.0, 1.0, k);
    while j > 1.0 && term > sum * precision {
        j -= 1.0;
        term *= j * inverse;
        sum += term;
    }
    sum * k * inverse
}

/// Density of Gamma(`shape`, 1) at `x`, for a shape of at least 1.
pub fn density(shape: u64, x: f64) -> f64 {
    if shape == 1 {
        return if x < 0.0 { 0.0 } else { (-x).exp() };
    }
    if x <= 0.0 { 0.0 } else { power_over_factorial(shape, x) * shape as f64 / x }
}

/// Quantile of Gamma(`shape`, 1): the x beyond which the given tail has the given probability, strictly between 0
/// and 1. Returns 0 for shape 0.
pub fn quantile(shape: u64, tail: Tail, probability: f64) -> f64 {
    thread_local! {
        static KNOWN: RefCell<HashMap<(u64, Tail, u64), f64>> = RefCell::default();
    }
    match (shape, tail) {
        (0, _) => return 0.0,
        (1, Tail::Lower) => return -(-probability).ln_1p(),
        (1, Tail::Upper) => return -probability.ln(),
        _ => {}
    }
    KNOWN.with_borrow_mut(|known| {
        let key = (shape, tail, probability.to_bits());
        if let Some(&x) = known.get(&key) {
            return x;
        }
        if known.len() >= CACHED_QUANTILES {
            known.clear();
        }
        let x = compute_quantile(shape, tail, probability);
        known.insert(key, x);
        x
    })
}

/// Newton's method on the logarithm of the tail, which is concave, so that it converges from any start.
fn compute_quantile(shape: u64, tail: Tail, probability: f64) -> f64 {
    let k = shape as f64;
    let mut x = first_guess(k, tail, probability);
    for _ in 0..100 {
        let (lower, upper) = tails(shape, x);
        let density = density(shape, x);
        let next = match tail {
            // In ln x, where the lower tail's logarithm is concave down to 0.
            Tail::Lower => x * (-(lower / probability).ln() * lower / (x * density)).clamp(-2.0, 2.0).exp(),
            Tail::Upper => (x + (upper / probability).ln() * upper / density).clamp(x / 4.0, 4.0 * x + 10.0),
        };
        let change = (next - x).abs();
        x = next;
        if change <= 1e-14 * x {
            break;
        }
    }
    x
}

/// Wilson and Hilferty's cube, or the leading term of the lower tail where the cube is far off.
fn first_guess(k: f64, tail: Tail, probability: f64) -> f64 {
    let normal = SQRT_2 * erfc_inv(2.0 * probability);
    let z = if tail == Tail::Upper { normal } else { -normal };
    let cube_root = 1.0 - 1.0 / (9.0 * k) + z / (3.0 * k.sqrt());
    if cube_root > 0.1 {
        return k * cube_root.powi(3);
    }
    // P ≈ x^k / k!, k! ≈ (k/e)^k
    k / std::f64::consts::E * probability.powf(1.0 / k)
}

/// x^k e^−x / k!: the Poisson probability of k at mean x > 0.
pub fn power_over_factorial(k: u64, x: f64) -> f64 {
    if k == 0 {
        return (-x).exp();
    }
    let n = k as f64;
    (-stirling_error(k) - deviance(n, x)).exp() / (2.0 * PI * n).sqrt()
}

/// ln k!.
pub(super) fn log_factorial(k: u64) -> f64 {
    if k == 0 {
        return 0.0;
    }
    let n = k as f64;
    stirling_error(k) + (n + 0.5) * n.ln() - n + 0.5 * (2.0 * PI).ln()
}

/// ln k! − ln(√(2πk) (k/e)^k).
pub(super) fn stirling_error(k: u64) -> f64 {
    /// For k below 16, where the series is not accurate enough; the first entry is not used.
    const SMALL: [f64; 16] = [
        0.0,
        0.08106146679532726,
        0.0413406959554093,
        0.02767792568499834,
        0.020790672103765093,
        0.016644691189821193,
        0.013876128823070748,
        0.01189670994589177,
        0.010411265261972096,
        0.009255462182712733,
        0.00833056343336287,
        0.007573675487951841,
        0.00694284010720953,
        0.006408994188004207,
        0.0059513701127588475,
        0.005554733551962801,
    ];
    if let Some(&known) = SMALL.get(k as usize) {
        return known;
    }
    let n = k as f64;
    let m = 1.0 / (n * n);
    (1.0 / 12.0 - m * (1.0 / 360.0 - m * (1.0 / 1260.0 - m * (1.0 / 1680.0 - m / 1188.0)))) / n
}

/// k ln(k/x) + x − k, without cancellation near x = k.
pub(super) fn deviance(k: f64, x: f64) -> f64 {
    let d = (x - k) / k;
    if d.abs() > 0.2 {
        return k * (k / x).ln() + x - k;
    }
    // d − ln(1 + d) with ln(1 + d) = 2 artanh v, v = d/(2 + d)
    let v = d / (2.0 + d);
    let square = v * v;
    let (mut power, mut sum, mut j) = (2.0 * v, d * v, 1.0);
    loop {
        power *= square;
        j += 2.0;
        let next = sum - power / j;
        if next == sum {
            return k * next;
        }
        sum = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use statrs::function::gamma::{gamma_lr, gamma_ur};

    #[test]
    fn tails_agree_with_the_library() {
        for shape in [1u64, 2, 3, 7, 15, 16, 40, 300] {
            for factor in [0.01, 0.3, 0.9, 1.0, 1.01, 1.5, 3.0] {
                let x = shape as f64 * factor;
                let (lower, upper) = tails(shape, x);
                let near = |a: f64, b: f64| (a - b).abs() <= 1e-10 * b + 1e-14;
                assert!(near(lower, gamma_lr(shape as f64, x)), "{shape} {x} {lower}");
                assert!(near(upper, gamma_ur(shape as f64, x)), "{shape} {x} {upper}");
            }
        }
    }

    /// The two forms agree where one takes over from the other, on both sides and far out in the tails.
    #[test]
    fn large_shapes_continue_the_small_ones() {
        let k = LARGE as f64;
        for sigmas in [-8.0, -3.0, -1.0, -0.01, 0.01, 0.5, 2.0, 6.0] {
            let x = k + sigmas * k.sqrt();
            let (lower, upper) = tails(LARGE, x);
            // By the series, for every shape.
            let factor = power_over_factorial(LARGE, x);
            let small = if x <= k { factor * lower_series(k, x, 1e-17) } else { factor * upper_series(k, x, 1e-17) };
            let ours = if x <= k { lower } else { upper };
            assert!((ours / small - 1.0).abs() < 1e-6, "{sigmas}: {ours}, {small}");
            assert!((lower + upper - 1.0).abs() < 1e-12);
        }
        for shape in [LARGE, 1 << 40, 1 << 60, u64::MAX] {
            for probability in [1e-9, 0.025, 0.5, 0.975] {
                let x = quantile(shape, Tail::Lower, probability);
                let sigmas = (x - shape as f64) / (shape as f64).sqrt();
                assert!(
                    (0.5 * erfc(-sigmas / SQRT_2) / probability - 1.0).abs() < 0.1,
                    "{shape} {probability} {sigmas}"
                );
            }
        }
    }

    #[test]
    fn quantiles_return_their_probability() {
        for shape in [1u64, 2, 3, 5, 10, 100, 4_321, 1_000_000] {
            for probability in [1e-12, 1e-4, 0.005, 0.025, 0.1, 0.4, 0.6, 0.99] {
                let lower = tails(shape, quantile(shape, Tail::Lower, probability)).0;
                let upper = tails(shape, quantile(shape, Tail::Upper, probability)).1;
                // A relative error of 1e-15 in x becomes one of √k · 1e-15 in the probability.
                let tolerance = 1e-12 * (shape as f64).sqrt().max(10.0);
                assert!((lower / probability - 1.0).abs() < tolerance, "{shape} {probability} {lower}");
                assert!((upper / probability - 1.0).abs() < tolerance, "{shape} {probability} {upper}");
            }
        }
    }

    #[test]
    fn known_quantiles() {
        // χ² with 2 and 20 degrees of freedom at 97.5 %, halved (from tables; further digits by high-precision
        // arithmetic).
        assert!((quantile(1, Tail::Upper, 0.025) - 3.688_879_454_113_936).abs() < 1e-14);
        assert!((quantile(10, Tail::Upper, 0.025) - 17.084_803).abs() < 1e-6);
        assert_eq!(quantile(0, Tail::Lower, 0.025), 0.0);
    }
}
