//! Lifetimes of sampled blocks: the weighted Kaplan–Meier survival curve. Blocks still alive are censored at their age.

use serde::{Deserialize, Serialize};

use crate::outliving::{self, Octave};

/// Lifetimes of blocks, weighted by number of objects.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Lifetimes {
    /// Weighted median lifetime by the Kaplan–Meier curve, in seconds; `None` if more than half are still alive.
    pub median_seconds: Option<f64>,
    /// Share of allocations that their own thread freed before its next allocation, 0 to 1.
    pub temporary: f64,
    /// Survival curve: (age in seconds, share still alive at that age), ages ascending.
    pub survival: Vec<(f64, f64)>,
    /// Unweighted samples by their age when freed, or now if still alive; ages ascend. Empty if they were not counted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ages: Vec<Octave>,
}

/// One sampled block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Observation {
    /// Age when freed, or now if it is still alive, in seconds.
    pub age_seconds: f64,
    /// w: the number of allocations that it represents.
    pub weight: f64,
    /// Whether it was freed; otherwise it is censored.
    pub freed: bool,
    /// Whether its own thread freed it before its next allocation.
    pub temporary: bool,
}

/// Kaplan–Meier survival curve: (age in seconds, share still alive just after it) for each age at which a block was
/// freed, ages ascending.
///
/// S(t) = Π over ages t_j ≤ t of (1 − d_j / n_j), where d_j is the weight freed at t_j and n_j the weight that reached
/// t_j. A block that is censored at an age has reached it. Observations whose age is negative or not finite, or whose
/// weight is not positive and finite, are ignored.
pub fn survival_curve(observations: &[Observation]) -> Vec<(f64, f64)> {
    let mut sorted: Vec<&Observation> = observations
        .iter()
        .filter(|o| o.age_seconds.is_finite() && o.age_seconds >= 0.0 && o.weight.is_finite() && o.weight > 0.0)
        .collect();
    sorted.sort_by(|a, b| a.age_seconds.total_cmp(&b.age_seconds));
    // The weight at risk at each position, summed from the oldest block so that the last ones are exact.
    let mut at_risk = vec![0.0; sorted.len() + 1];
    for i in (0..sorted.len()).rev() {
        at_risk[i] = at_risk[i + 1] + sorted[i].weight;
    }
    let (mut curve, mut alive, mut first) = (Vec::new(), 1.0, 0);
    while first < sorted.len() {
        let age = sorted[first].age_seconds;
        let same = sorted[first..].iter().take_while(|o| o.age_seconds == age).count();
        let freed: f64 = sorted[first..first + same].iter().filter(|o| o.freed).map(|o| o.weight).sum();
        if freed > 0.0 {
            alive *= (1.0 - freed / at_risk[first]).max(0.0);
            curve.push((age, alive));
        }
        first += same;
    }
    curve
}

/// Median of a survival curve: the age by which half are freed, in seconds; `None` if more than half are still alive.
pub fn median_seconds(curve: &[(f64, f64)]) -> Option<f64> {
    curve.iter().find(|(_, alive)| *alive <= 0.5 + 1e-12).map(|(age, _)| *age)
}

/// Weighted share of temporary allocations among all, including those still alive. 0 without observations.
pub fn temporary_share(observations: &[Observation]) -> f64 {
    let all: f64 = observations.iter().map(|o| o.weight).sum();
    let temporary: f64 = observations.iter().filter(|o| o.temporary).map(|o| o.weight).sum();
    if all > 0.0 { temporary / all } else { 0.0 }
}

/// The lifetimes of the observed blocks, with a curve of at most `points` steps. `None` without observations.
pub fn lifetimes(observations: &[Observation], points: usize) -> Option<Lifetimes> {
    if observations.is_empty() {
        return None;
    }
    let curve = survival_curve(observations);
    Some(Lifetimes {
        median_seconds: median_seconds(&curve),
        temporary: temporary_share(observations),
        survival: thin(&curve, points),
        ages: Vec::new(),
    })
}

/// Pools the lifetimes of several stacks, each weighted by its number of allocations: the weighted mean of their
/// curves. `None` without stacks or weight.
pub fn pooled(parts: &[(&Lifetimes, f64)]) -> Option<Lifetimes> {
    let all: f64 = parts.iter().map(|(_, weight)| weight).sum();
    if let [(single, _)] = parts {
        return Some((*single).clone());
    }
    if all.is_nan() || all <= 0.0 {
        return None;
    }
    // Each step of a curve lowers the mean by its weighted fall.
    let mut falls: Vec<(f64, f64)> = Vec::new();
    for (lifetimes, weight) in parts {
        let mut alive = 1.0;
        for &(age, share) in &lifetimes.survival {
            falls.push((age, (alive - share) * weight / all));
            alive = share;
        }
    }
    falls.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut alive = 1.0;
    let survival: Vec<(f64, f64)> = falls
        .into_iter()
        .map(|(age, fall)| {
            alive = f64::max(alive - fall, 0.0);
            (age, alive)
        })
        .collect();
    let temporary = parts.iter().map(|(lifetimes, weight)| lifetimes.temporary * weight).sum::<f64>() / all;
    let ages = outliving::added(parts.iter().map(|(lifetimes, _)| lifetimes.ages.as_slice()));
    Some(Lifetimes { median_seconds: median_seconds(&survival), temporary, survival, ages })
}

/// Thins the curve to the last step of each of `points` equal falls, so that no kept step is off by more than one fall.
fn thin(curve: &[(f64, f64)], points: usize) -> Vec<(f64, f64)> {
    if curve.len() <= points {
        return curve.to_vec();
    }
    let fall = |alive: f64| ((1.0 - alive) * points as f64) as usize;
    let mut kept: Vec<(f64, f64)> =
        curve.windows(2).filter(|pair| fall(pair[0].1) != fall(pair[1].1)).map(|pair| pair[0]).collect();
    kept.extend(curve.last());
    // All first steps may lie within the first fall, so the number of steps is bounded here as well.
    kept.truncate(points.max(1));
    if let (Some(end), Some(last)) = (kept.last_mut(), curve.last()) {
        *end = *last;
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(age_seconds: f64, freed: bool) -> Observation {
        Observation { age_seconds, weight: 1.0, freed, temporary: false }
    }

    /// The usual textbook example (remission under 6-MP, 21 cases), S(6) = 0.857, S(10) = 0.753, S(23) = 0.448.
    #[test]
    fn textbook() {
        let freed = [6.0, 6.0, 6.0, 7.0, 10.0, 13.0, 16.0, 22.0, 23.0];
        let censored = [6.0, 9.0, 10.0, 11.0, 17.0, 19.0, 20.0, 25.0, 32.0, 32.0, 34.0, 35.0];
        let all: Vec<Observation> =
            freed.iter().map(|&t| seen(t, true)).chain(censored.iter().map(|&t| seen(t, false))).collect();
        let curve = survival_curve(&all);
        let at = |age: f64| curve.iter().find(|(t, _)| *t == age).expect("a step").1;
        for (age, alive) in [(6.0, 0.857), (7.0, 0.807), (10.0, 0.753), (13.0, 0.690), (16.0, 0.627), (23.0, 0.448)] {
            assert!((at(age) - alive).abs() < 5e-4, "{age}: {}", at(age));
        }
        assert_eq!(median_seconds(&curve), Some(23.0));
    }

    #[test]
    fn weights_count_as_copies() {
        let weighted = [
            Observation { weight: 3.0, ..seen(1.0, true) },
            Observation { weight: 2.0, ..seen(2.0, false) },
            Observation { weight: 1.0, ..seen(3.0, true) },
        ];
        let copies: Vec<Observation> =
            weighted.iter().flat_map(|o| vec![Observation { weight: 1.0, ..*o }; o.weight as usize]).collect();
        assert_eq!(survival_curve(&weighted), survival_curve(&copies));
        assert_eq!(survival_curve(&weighted), [(1.0, 0.5), (3.0, 0.0)]);
    }

    #[test]
    fn nothing_freed_and_nothing_at_all() {
        assert_eq!(median_seconds(&survival_curve(&[seen(5.0, false)])), None);
        assert_eq!(lifetimes(&[], 10), None);
        let odd = [seen(f64::NAN, true), Observation { weight: -1.0, ..seen(1.0, true) }];
        assert!(survival_curve(&odd).is_empty());
    }

    /// One stack whose blocks are freed at 1 s, and one with three times as many allocations, freed at 2 s and 4 s.
    #[test]
    fn curves_of_several_stacks_are_averaged() {
        let octave = |exponent, freed| Octave { exponent, freed, left: 1 };
        let ages = vec![octave(29, 5)];
        let short = Lifetimes { median_seconds: Some(1.0), temporary: 1.0, survival: vec![(1.0, 0.0)], ages };
        let (survival, ages) = (vec![(2.0, 0.5), (4.0, 0.0)], vec![octave(29, 1), octave(31, 7)]);
        let long = Lifetimes { median_seconds: Some(2.0), temporary: 0.0, survival, ages };
        let both = pooled(&[(&short, 1.0), (&long, 3.0)]).expect("both have some");
        assert_eq!(both.survival, [(1.0, 0.75), (2.0, 0.375), (4.0, 0.0)]);
        assert_eq!((both.median_seconds, both.temporary), (Some(2.0), 0.25));
        assert_eq!(both.ages, [Octave { exponent: 29, freed: 6, left: 2 }, octave(31, 7)]);
        assert_eq!(pooled(&[(&long, 3.0)]), Some(long.clone()));
        assert_eq!((pooled(&[]), pooled(&[(&short, 0.0), (&long, 0.0)])), (None, None));
    }

    #[test]
    fn thinned_curve_keeps_shape_and_end() {
        let all: Vec<Observation> = (0..10_000).map(|i| seen(f64::from(i), true)).collect();
        let lifetimes = lifetimes(&all, 50).expect("observations");
        assert!(lifetimes.survival.len() <= 50);
        assert_eq!(lifetimes.survival.last(), Some(&(9_999.0, 0.0)));
        for (age, alive) in &lifetimes.survival {
            assert!((alive - (1.0 - (age + 1.0) / 10_000.0)).abs() < 0.03);
        }
        assert_eq!(lifetimes.median_seconds, Some(4_999.0));
    }
}
