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
    fn two_classes_by_hand() {
        // Keys 1·√1, 3·√(1/4) and so on: p is proportional to the key and uses up the budget.
        let classes = [class(1.0, 0.5, 0.5), class(3.0, 0.5, 0.125)];
        let found = optimum(&classes, 0.1);
        let [small, large] = found.probabilities[..] else { panic!("two classes") };
        assert!((large / small - 1.5).abs() < 1e-12);
        assert!((cost(&classes, &found.probabilities) - 0.1).abs() < 1e-12);
    }

    #[test]
    fn budget_for_everything() {
        let classes = [class(16.0, 0.5, 0.5), class(32.0, 0.5, 0.5)];
        let found = optimum(&classes, 1.0);
        assert_eq!((found.probabilities, found.scale, found.variance), (vec![1.0, 1.0], None, 0.0));
        assert_eq!(optimum(&[], 1.0).variance, 0.0);
    }

    /// No nearby probabilities of the same cost have a smaller variance.
    #[test]
    fn it_is_a_minimum() {
        let classes = [class(16.0, 0.7, 0.2), class(200.0, 0.2, 0.5), class(9_000.0, 0.1, 0.3)];
        let found = optimum(&classes, 0.05);
        for (from, to) in [(0, 1), (1, 0), (0, 2), (1, 2)] {
            let mut moved = found.probabilities.clone();
            let amount = 1e-4 * moved[from].min(1.0 - moved[to]);
            moved[from] -= amount / classes[from].allocations;
            moved[to] += amount / classes[to].allocations;
            if moved[from] > 0.0 && moved[to] <= 1.0 {
                assert!(variance(&classes, &moved) >= found.variance);
            }
        }
    }

    /// Chromium's rule is proportional to the size and optimal for equal lifetimes, but not for others.
    #[test]
    fn chromiums_rule_is_the_optimum_for_equal_lifetimes() {
        let equal = [class(16.0, 0.6, 0.6), class(64.0, 0.3, 0.3), class(256.0, 0.1, 0.1)];
        let found = proportional_to_size(&equal, 0.05);
        let [small, middle, large] = found.probabilities[..] else { panic!("three classes") };
        assert!((middle / small - 4.0).abs() < 1e-9 && (large / small - 16.0).abs() < 1e-9);
        assert!((cost(&equal, &found.probabilities) - 0.05).abs() < 1e-12);
        assert_eq!(found, optimum(&equal, 0.05));
        let unequal = [class(16.0, 0.6, 0.9), class(64.0, 0.3, 0.05), class(256.0, 0.1, 0.05)];
        let (rule, best) = (proportional_to_size(&unequal, 0.05), optimum(&unequal, 0.05));
        assert!(best.variance < 0.95 * rule.variance, "{best:?} {rule:?}");
        assert_eq!((per_byte_variance(&equal, 1), per_byte(&equal, 1)), (0.0, vec![1.0; 3]));
    }
}
