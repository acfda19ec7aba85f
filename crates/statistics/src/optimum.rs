//! Optimal sampling probabilities by size for a given budget of samples.
//!
//! The problem is to minimise the variance of the live bytes, Σ Z² l (1 − p)/p, subject to Σ a p ≤ budget and p ≤ 1,
//! where a class of size Z has the share a of allocations and the share l of live blocks. By Lagrange multipliers
//! p = min(1, c Z √(l/a)).

use super::weight::log_q;

/// How a workload uses a size class.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClassUse {
    /// Z: bytes of an allocation.
    pub size_bytes: f64,
    /// a: the share (or rate) of allocations in this class.
    pub allocations: f64,
    /// l: the share (or number) of live blocks in this class. Set it to `allocations` to optimise for allocated bytes.
    pub live: f64,
}

/// The optimal probabilities for a budget.
#[derive(Clone, Debug, PartialEq)]
pub struct Optimum {
    /// p of each class, in the order given; 0 for a class without live blocks.
    pub probabilities: Vec<f64>,
    /// c, or `None` if the budget samples everything that is live.
    pub scale: Option<f64>,
    /// Σ Z² l (1 − p)/p over the classes with live blocks.
    pub variance: f64,
}

/// Solves the problem for `budget` expected samples (in the unit of `allocations`).
///
/// Classes in descending order of Z √(l/a) reach p = 1 first, so the saturated ones are a prefix of that order.
pub fn optimum(classes: &[ClassUse], budget: f64) -> Optimum {
    let key = |class: &ClassUse| class.size_bytes * (class.live / class.allocations).sqrt();
    let mut order: Vec<usize> =
        (0..classes.len()).filter(|&i| classes[i].live > 0.0 && classes[i].allocations > 0.0).collect();
    order.sort_by(|&a, &b| key(&classes[b]).total_cmp(&key(&classes[a])));
    // Demand of the classes from each position on, for a scale of 1.
    let mut demand = vec![0.0; order.len() + 1];
    for (position, &i) in order.iter().enumerate().rev() {
        demand[position] = demand[position + 1] + key(&classes[i]) * classes[i].allocations;
    }
    let mut probabilities = vec![0.0; classes.len()];
    let mut left = budget;
    let mut scale = None;
    for (position, &i) in order.iter().enumerate() {
        let c = left / demand[position];
        if c * key(&classes[i]) <= 1.0 {
            scale = Some(c);
            for &j in &order[position..] {
                probabilities[j] = c * key(&classes[j]);
            }
            break;
        }
        probabilities[i] = 1.0;
        left -= classes[i].allocations;
    }
    // A budget for every allocation has no scale, even if the last class just reached 1.
    let all: f64 = order.iter().map(|&i| classes[i].allocations).sum();
    if budget >= all {
        scale = None;
        for &i in &order {
            probabilities[i] = 1.0;
        }
    }
    Optimum { variance: variance(classes, &probabilities), probabilities, scale }
}

/// Σ Z² l (1 − p)/p over the classes with live blocks.
pub fn variance(classes: &[ClassUse], probabilities: &[f64]) -> f64 {
    classes
        .iter()
        .zip(probabilities)
        .filter(|(class, _)| class.live > 0.0)
        .map(|(class, p)| class.size_bytes * class.size_bytes * class.live * (1.0 - p) / p)
        .sum()
}

/// Probabilities of per-byte Bernoulli sampling with the interval R, in bytes: p = 1 − (1 − 1/R)^Z.
pub fn per_byte(classes: &[ClassUse], interval: u64) -> Vec<f64> {
    classes
        .iter()
        .map(|class| if interval <= 1 { 1.0 } else { -(class.size_bytes * log_q(interval)).exp_m1() })
        .collect()
}

/// Variance of per-byte sampling, Σ Z² l qᶻ/(1 − qᶻ), computed without cancellation where p is near 1.
pub fn per_byte_variance(classes: &[ClassUse], interval: u64) -> f64 {
    if interval <= 1 {
        return 0.0;
    }
    classes
        .iter()
        .filter(|class| class.live > 0.0)
        .map(|class| class.size_bytes.powi(2) * class.live / (-class.size_bytes * log_q(interval)).exp_m1())
        .sum()
}

/// Expected number (or rate) of samples under the given probabilities: Σ a p.
pub fn cost(classes: &[ClassUse], probabilities: &[f64]) -> f64 {
    classes.iter().zip(probabilities).map(|(class, p)| class.allocations * p).sum()
}

/// Chromium's rule p = min(1, Z / R′), with the R′ that uses up `budget`. It is optimal for equal lifetimes (l ∝ a).
pub fn proportional_to_size(classes: &[ClassUse], budget: f64) -> Optimum {
    let equal: Vec<ClassUse> = classes.iter().map(|class| ClassUse { live: class.allocations, ..*class }).collect();
    let found = optimum(&equal, budget);
    Optimum { variance: variance(classes, &found.probabilities), ..found }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(size_bytes: f64, allocations: f64, live: f64) -> ClassUse {
        ClassUse { size_bytes, allocations, live }
    }

    #[test]
    fn budget_for_everything() {
        let classes = [class(16.0, 0.5, 0.5), class(32.0, 0.5, 0.5)];
        let found = optimum(&classes, 1.0);
        assert_eq!((found.probabilities, found.scale, found.variance), (vec![1.0, 1.0], None, 0.0));
        assert_eq!(optimum(&[], 1.0).variance, 0.0);
    }
}
