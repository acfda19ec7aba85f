//! Pointwise confidence bands of survival curves.
//!
//! A surviving share S carries as much information as some number of fully observed blocks. That number follows from
//! Greenwood's variance over octaves of age (the life table: a block last seen in use in an octave counts as half a
//! block at risk there). It is at most the number still at risk divided by S (Peto), which shrinks in the tail, where
//! Greenwood's does not. The interval is Clopper and Pearson's with that number, as Korn and Graubard (1998) do for
//! weighted samples. So it stays within 0 and 1 and has a width even where S is 0 or 1.

use statrs::distribution::{Beta, ContinuousCDF};

use crate::outliving::Octave;

/// More samples than this are capped. The band has no width then, and the search for quantiles of absurd numbers never
/// ends.
const MOST_SAMPLES: f64 = 1e9;

/// With fewer samples than this, nothing is known.
const LEAST_SAMPLES: f64 = 1e-3;

/// A surviving share with its interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Band {
    /// Age in seconds.
    pub age_seconds: f64,
    /// Lower end of the interval of the share, 0 to 1.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// The band of a survival curve: its interval at age 0, just after each step of the curve, at the start of each octave,
/// and at the end of the last one. Empty without samples.
///
/// `curve` has (age in seconds, share still alive), ages ascending; `ages` has the samples that it was computed from.
/// `design_effect` (at least 1) is how many weighted samples are worth one sample of equal weight: n Σw² / (Σw)²
/// (Kish). `confidence` is 0 to 1.
pub fn band(curve: &[(f64, f64)], ages: &[Octave], design_effect: f64, confidence: f64) -> Vec<Band> {
    let table = Table::of(ages);
    let Some(all) = table.reached.first().copied().filter(|all| *all > 0.0) else { return Vec::new() };
    let mut at: Vec<f64> = curve.iter().map(|(age, _)| *age).collect();
    at.extend(ages.iter().map(|octave| Octave::begin_seconds(octave.exponent)));
    at.extend(ages.last().map(|octave| Octave::begin_seconds(octave.exponent.saturating_add(1))));
    at.sort_by(f64::total_cmp);
    at.dedup();
    let mut samples = all;
    let mut bands = Vec::with_capacity(at.len() + 1);
    for age_seconds in std::iter::once(0.0).chain(at) {
        let share = curve.iter().take_while(|(age, _)| *age <= age_seconds).last().map_or(1.0, |(_, share)| *share);
        samples = table.worth(curve, age_seconds, share).unwrap_or(samples);
        let (low, high) = clopper_pearson(share, samples / design_effect.max(1.0), confidence);
        bands.push(Band { age_seconds, low, high });
    }
    bands
}

/// Samples by octave of age.
struct Table<'a> {
    ages: &'a [Octave],
    /// Samples that reached each octave.
    reached: Vec<f64>,
}

impl<'a> Table<'a> {
    fn of(ages: &'a [Octave]) -> Self {
        let mut reached = vec![0.0; ages.len()];
        let mut sum = 0.0;
        for (at, octave) in ages.iter().enumerate().rev() {
            sum += octave.freed as f64 + octave.left as f64;
            reached[at] = sum;
        }
        Self { ages, reached }
    }

    /// How many uncensored samples would be as good as these at an age: (1 − S)/(S V), where V is Greenwood's sum, and
    /// at most r/S, where r samples are at risk. `None` where neither has a value because all were freed.
    fn worth(&self, curve: &[(f64, f64)], age: f64, share: f64) -> Option<f64> {
        let mut sum = 0.0;
        let mut at_risk_now = self.reached.first().copied()?;
        for (octave, reached) in self.ages.iter().zip(&self.reached) {
            let (begin, end) =
                (Octave::begin_seconds(octave.exponent), Octave::begin_seconds(octave.exponent.saturating_add(1)));
            if begin > age {
                break;
            }
            // In the octave that contains the age, only the part of the frees by which the curve has fallen so far.
            let freed = octave.freed as f64 * if end <= age { 1.0 } else { part_of_fall(curve, begin, end, share) };
            let left = octave.left as f64 * ((age - begin) / (end - begin)).min(1.0);
            at_risk_now = reached - freed - left;
            let at_risk = reached - octave.left as f64 / 2.0;
            sum += freed / (at_risk * (at_risk - freed));
        }
        let by_greenwood = (1.0 - share) / (share * sum);
        let by_risk = at_risk_now.max(0.0) / share;
        let known = [by_greenwood, by_risk].into_iter().filter(|worth| worth.is_finite());
        known.reduce(f64::min)
    }
}

/// Which part of a curve's fall within an octave happens before it reaches `share`.
fn part_of_fall(curve: &[(f64, f64)], begin: f64, end: f64, share: f64) -> f64 {
    let before = curve.iter().take_while(|(age, _)| *age < begin).last().map_or(1.0, |(_, share)| *share);
    let after = curve.iter().take_while(|(age, _)| *age < end).last().map_or(1.0, |(_, share)| *share);
    if before > after { ((before - share) / (before - after)).clamp(0.0, 1.0) } else { 1.0 }
}

/// Clopper and Pearson's interval of a share that was observed in `samples`, which need not be whole.
fn clopper_pearson(share: f64, samples: f64, confidence: f64) -> (f64, f64) {
    let tail = (1.0 - confidence) / 2.0;
    let samples = samples.min(MOST_SAMPLES);
    let hits = (share * samples).clamp(0.0, samples);
    if samples.is_nan() || samples < LEAST_SAMPLES {
        return (0.0, 1.0);
    }
    let low = if hits <= 0.0 { 0.0 } else { beta_quantile(hits, samples - hits + 1.0, tail) };
    let high = if hits >= samples { 1.0 } else { beta_quantile(hits + 1.0, samples - hits, 1.0 - tail) };
    (low, high)
}

/// Quantile of a beta distribution by bisection: statrs' own search does not end for some parameters.
fn beta_quantile(a: f64, b: f64, probability: f64) -> f64 {
    const HALVINGS: u32 = 50;
    let Ok(beta) = Beta::new(a, b) else { return 0.5 };
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..HALVINGS {
        let middle = f64::midpoint(low, high);
        if beta.cdf(middle) < probability { low = middle } else { high = middle }
    }
    f64::midpoint(low, high)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::survival::{Observation, survival_curve};
    use heapbpf_testing::Random;

    /// From tables of binomial limits: 10 of 20, 0 of 10.
    #[test]
    fn binomial_limits() {
        let near = |(low, high): (f64, f64), expected: (f64, f64)| {
            assert!((low - expected.0).abs() < 5e-4 && (high - expected.1).abs() < 5e-4, "{low} {high}");
        };
        near(clopper_pearson(0.5, 20.0, 0.95), (0.2720, 0.7280));
        near(clopper_pearson(0.0, 10.0, 0.95), (0.0, 0.3085));
        near(clopper_pearson(1.0, 10.0, 0.95), (0.6915, 1.0));
    }

    fn at(bands: &[Band], age: f64) -> Band {
        *bands.iter().take_while(|band| band.age_seconds <= age).last().expect("age 0")
    }

    /// Without censoring, a share is worth all samples, so the band is the binomial interval.
    #[test]
    fn without_censoring_it_is_the_binomial_interval() {
        // Ten freed at 1.5 s and ten at 100 s.
        let ages = [Octave { exponent: 30, freed: 10, left: 0 }, Octave { exponent: 36, freed: 10, left: 0 }];
        let curve = [(1.5, 0.5), (100.0, 0.0)];
        let bands = band(&curve, &ages, 1.0, 0.95);
        for (age, share) in [(0.0, 1.0), (1.5, 0.5), (100.0, 0.0)] {
            let (found, expected) = (at(&bands, age), clopper_pearson(share, 20.0, 0.95));
            assert!(
                (found.low - expected.0).abs() < 1e-9 && (found.high - expected.1).abs() < 1e-9,
                "{found:?} {expected:?}"
            );
        }
        // Unequal weights make it wider.
        assert!(at(&band(&curve, &ages, 4.0, 0.95), 1.5).low < at(&bands, 1.5).low);
        assert!(band(&[], &[], 1.0, 0.95).is_empty());
    }

    /// Where no blocks at risk are left, the band says that nothing is known.
    #[test]
    fn the_tail_widens_as_blocks_at_risk_run_out() {
        let ages = [Octave { exponent: 30, freed: 10, left: 0 }, Octave { exponent: 33, freed: 0, left: 10 }];
        let bands = band(&[(1.5, 0.5)], &ages, 1.0, 0.95);
        let [early, late] = [at(&bands, 2.0), at(&bands, 1e3)];
        assert!(early.low > 0.25 && late.low < 0.01 && late.high > 0.99, "{early:?} {late:?}");
    }

    /// Blocks with exponential lifetimes of mean 1 s, allocated throughout 3 s. Returns how many of `rounds` bands at
    /// 95 % hold the true share at each of three ages. The draws are the same in each run.
    fn held(rounds: usize) -> [usize; 3] {
        let mut random = Random(7);
        let mut held = [0; 3];
        let tried = [0.2, 1.0, 2.0];
        for _ in 0..rounds {
            let observations: Vec<Observation> = (0..60)
                .map(|_| {
                    let (lifetime, seen) = (-random.uniform().ln(), 3.0 * random.uniform());
                    Observation {
                        age_seconds: lifetime.min(seen),
                        weight: 1.0,
                        freed: lifetime < seen,
                        temporary: false,
                    }
                })
                .collect();
            let mut ages: Vec<Octave> = Vec::new();
            for observation in &observations {
                let exponent = (observation.age_seconds * 1e9).max(1.0).log2() as u32;
                let index = ages.iter().position(|octave| octave.exponent == exponent).unwrap_or_else(|| {
                    ages.push(Octave { exponent, ..Octave::default() });
                    ages.len() - 1
                });
                *(if observation.freed { &mut ages[index].freed } else { &mut ages[index].left }) += 1;
            }
            ages.sort_by_key(|octave| octave.exponent);
            let bands = band(&survival_curve(&observations), &ages, 1.0, 0.95);
            for (held, age) in held.iter_mut().zip(tried) {
                let band = at(&bands, age);
                *held += usize::from((band.low..=band.high).contains(&f64::exp(-age)));
            }
        }
        held
    }

    #[test]
    fn the_band_holds_the_true_share() {
        let held = held(100);
        assert!(held.iter().all(|held| *held >= 90), "{held:?}");
    }

    mod long {
        use super::*;

        /// Of 2,000 curves per age, fewer than 1,880 (94 %) would have a probability of 3 % each if coverage were
        /// exactly 95 %.
        #[test]
        fn the_band_holds_the_true_share_as_often_as_it_says() {
            let held = held(2_000);
            assert!(held.iter().all(|held| *held >= 1_880), "{held:?}");
        }
    }
}
