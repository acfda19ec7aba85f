//! Tests whether some blocks live far beyond the lifetime curve of their own stack.
//!
//! The null hypothesis is that all blocks of a stack follow one lifetime distribution, under which the chance of being
//! freed in the next doubling of the age does not fall with age. That holds for exponential, Weibull, gamma, log-normal
//! and Pareto distributions, whatever their parameters, so a heavy tail alone raises no suspicion. A share of blocks
//! that is never freed breaks it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::binomial;

/// Samples whose age was between 2^`exponent` ns and twice that. In files, it is a list of its fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(u32, u64, u64)", into = "(u32, u64, u64)")]
pub struct Octave {
    /// Binary logarithm of the lowest age, in nanoseconds.
    pub exponent: u32,
    /// Samples that were freed at that age.
    pub freed: u64,
    /// Samples that had that age when they were last known to be in use.
    pub left: u64,
}

impl From<(u32, u64, u64)> for Octave {
    fn from((exponent, freed, left): (u32, u64, u64)) -> Self {
        Self { exponent, freed, left }
    }
}

impl From<Octave> for (u32, u64, u64) {
    fn from(Octave { exponent, freed, left }: Octave) -> Self {
        (exponent, freed, left)
    }
}

impl Octave {
    /// Lowest age of the octave with this exponent, in seconds.
    pub fn begin_seconds(exponent: u32) -> f64 {
        2_f64.powi(exponent.min(64) as i32) * 1e-9
    }
}

/// Octaves between the ages where blocks are freed and the ages that are "far beyond": at least a factor of 4.
const GAP: usize = 2;
/// How many times rarer frees must be in the later octaves.
const FAR_RARER: f64 = 4.0;
/// Blocks younger than this (8 ms) do not count as outliving: any code that runs at the end of a recording may still be
/// using them.
const LEAST_EXPONENT: u32 = 23;
/// Exponents beyond this are ignored: 2^63 ns are 292 years.
const MOST_EXPONENT: u32 = 63;
/// Larger counts of an octave are capped at this, so that sums cannot overflow.
const MOST_SAMPLES: u64 = 1 << 40;

/// Samples that outlive the lifetime curve of their stack.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outliving {
    /// Probability of samples like these or more extreme under the null hypothesis, corrected for the number of ages
    /// tried.
    pub p_value: f64,
    /// Age up to which frees were frequent, in seconds.
    pub usual_seconds: f64,
    /// Samples freed by that age.
    pub freed: u64,
    /// The age that counts as far beyond, in seconds.
    pub beyond_seconds: f64,
    /// Samples older than that and not freed.
    pub older: u64,
    /// Frees beyond that age. `expected_beyond` is the number to be expected there from the earlier frequency.
    pub freed_beyond: u64,
    /// See `freed_beyond`.
    pub expected_beyond: f64,
}

/// Adds up counts of ages. If some parts have frees, parts without any are left out: they may come from an idle process
/// or thread, whose blocks in use are no evidence.
pub fn added<'a>(parts: impl Iterator<Item = &'a [Octave]>) -> Vec<Octave> {
    let has_frees = |part: &[Octave]| part.iter().any(|octave| octave.freed > 0);
    let parts: Vec<&[Octave]> = parts.collect();
    let some_have = parts.iter().any(|part| has_frees(part));
    let mut sums: BTreeMap<u32, Octave> = BTreeMap::new();
    for octave in parts.into_iter().filter(|part| !some_have || has_frees(part)).flatten() {
        let sum = sums.entry(octave.exponent).or_insert(Octave { exponent: octave.exponent, ..Octave::default() });
        sum.freed = sum.freed.saturating_add(octave.freed);
        sum.left = sum.left.saturating_add(octave.left);
    }
    sums.into_values().collect()
}

/// Samples by octave, starting with the first octave that has a sample.
struct Table {
    first: u32,
    freed: Vec<u64>,
    left: Vec<u64>,
    /// Samples that reached the octave.
    reached: Vec<u64>,
}

impl Table {
    fn of(ages: &[Octave]) -> Option<Self> {
        let ages = added([ages].into_iter());
        let known =
            || ages.iter().filter(|octave| octave.exponent <= MOST_EXPONENT && octave.freed.max(octave.left) > 0);
        let (first, last) = (known().map(|it| it.exponent).min()?, known().map(|it| it.exponent).max()?);
        let size = (last - first) as usize + 1;
        let (mut freed, mut left, mut reached) = (vec![0; size], vec![0; size], vec![0; size]);
        for octave in known() {
            freed[(octave.exponent - first) as usize] = octave.freed.min(MOST_SAMPLES);
            left[(octave.exponent - first) as usize] = octave.left.min(MOST_SAMPLES);
        }
        let mut sum = 0;
        for at in (0..size).rev() {
            sum += freed[at] + left[at];
            reached[at] = sum;
        }
        Some(Self { first, freed, left, reached })
    }

    /// Trials and frees in a range of octaves. Each sample that reached an octave counts as a trial.
    fn usual(&self, begin: usize, end: usize) -> (u64, u64) {
        (self.reached[begin..end].iter().sum(), self.freed[begin..end].iter().sum())
    }

    /// Trials and frees from an octave onwards. Only samples that were observed through an octave count as trials.
    fn beyond(&self, begin: usize) -> (u64, u64) {
        let trials = (begin..self.freed.len()).map(|at| self.reached[at] - self.left[at]).sum();
        (trials, self.freed[begin..].iter().sum())
    }
}

/// Tests whether some samples of a stack live far beyond its curve. `None` if the samples cannot tell, because none was
/// freed or none was observed far beyond the ages at which others were freed.
///
/// Each octave that a sample reaches is a trial: is it freed in that octave? For each range of octaves, the frees in
/// all octaves that begin at least a factor of four later are counted and compared with a binomial number (given the
/// frees of both). Samples that were not observed through an octave count as trials in the early range but not in the
/// late one; both choices err on the side of no suspicion. The smallest p-value is multiplied by the number of
/// comparisons (Bonferroni).
pub fn outliving(ages: &[Octave]) -> Option<Outliving> {
    let table = Table::of(ages)?;
    let size = table.freed.len();
    let (mut tried, mut best): (u32, Option<(f64, usize, usize)>) = (0, None);
    for end in 1..size.saturating_sub(GAP) {
        let (late, late_freed) = table.beyond(end + GAP);
        if late == 0 {
            break;
        }
        if LEAST_EXPONENT > table.first + (end + GAP) as u32 {
            continue;
        }
        for begin in 0..end {
            let (early, freed) = table.usual(begin, end);
            tried += 1;
            if freed == 0 {
                continue;
            }
            let p = binomial::at_least(freed + late_freed, freed, early as f64 / (early + late) as f64);
            if best.is_none_or(|(least, ..)| p < least) {
                best = Some((p, begin, end));
            }
        }
    }
    let (p, begin, end) = best?;
    let (early, freed) = table.usual(begin, end);
    let (late, freed_beyond) = table.beyond(end + GAP);
    let expected_beyond = late as f64 * freed as f64 / early as f64;
    let older = table.left[end + GAP..].iter().sum();
    let is_far = freed_beyond as f64 * FAR_RARER <= expected_beyond && older > 0;
    Some(Outliving {
        p_value: if is_far { (p * f64::from(tried)).min(1.0) } else { 1.0 },
        usual_seconds: Octave::begin_seconds(table.first + end as u32),
        freed: table.freed[..end].iter().sum(),
        beyond_seconds: Octave::begin_seconds(table.first + (end + GAP) as u32),
        older,
        freed_beyond,
        expected_beyond,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use heapbpf_testing::Random;

    /// A recording of `duration` ns: `blocks` blocks begin at random times and live as long as `law` says.
    fn recorded(random: &mut Random, blocks: usize, duration: f64, law: impl Fn(&mut Random) -> f64) -> Vec<Octave> {
        let lives: Vec<(f64, f64)> = (0..blocks).map(|_| (random.uniform() * duration, law(random).max(1.0))).collect();
        // Samples count as in use until the last free.
        let ends = lives.iter().map(|(begin, lived)| begin + lived).filter(|end| *end <= duration);
        let last = ends.fold(0.0, f64::max);
        let seen = lives.iter().map(|&(begin, lived)| (lived.min(last - begin), begin + lived <= duration));
        let octave = |(age, freed): (f64, bool)| Octave {
            exponent: age.max(1.0).log2() as u32,
            freed: u64::from(freed),
            left: u64::from(!freed),
        };
        let ages: Vec<Octave> = seen.filter(|(age, _)| *age > 0.0).map(octave).collect();
        added([ages.as_slice()].into_iter())
    }

    const SECOND: f64 = 1e9;

    /// A normal number, closely enough: the sum of twelve uniform ones.
    fn normal(random: &mut Random) -> f64 {
        (0..12).map(|_| random.uniform()).sum::<f64>() - 6.0
    }

    /// Largest share of recordings without a leak in which p ≤ 0.05, over all laws and numbers of blocks. Prints each
    /// share for the documentation.
    fn worst_share_of_alarms(numbers: &[usize], rounds: u32) -> f64 {
        type Law = fn(&mut Random) -> f64;
        let laws: [(&str, Law); 9] = [
            ("exponential, 10 ms", |random| -1e7 * random.uniform().ln()),
            ("exponential, 1 s", |random| -1e9 * random.uniform().ln()),
            ("Weibull 0.3", |random| 1e6 * (-random.uniform().ln()).powf(1.0 / 0.3)),
            ("log-normal, sigma 3", |random| 1e6 * (3.0 * normal(random)).exp()),
            ("Pareto 0.1", |random| 1e3 * random.uniform().powf(-10.0)),
            ("Pareto 0.3", |random| 1e3 * random.uniform().powf(-1.0 / 0.3)),
            ("Pareto 0.5", |random| 1e4 * random.uniform().powf(-2.0)),
            ("Pareto 1", |random| 1e5 * random.uniform().powf(-1.0)),
            ("Pareto 2", |random| 1e7 * random.uniform().powf(-0.5)),
        ];
        let mut random = Random(1);
        let mut worst = 0.0_f64;
        for (name, law) in laws {
            for &blocks in numbers {
                let alarm = |random: &mut Random| {
                    outliving(&recorded(random, blocks, 10.0 * SECOND, law)).is_some_and(|it| it.p_value <= 0.05)
                };
                let alarms = (0..rounds).filter(|_| alarm(&mut random)).count();
                let share = alarms as f64 / f64::from(rounds);
                println!("{name}, {blocks} blocks: {share}");
                worst = worst.max(share);
            }
        }
        worst
    }

    #[test]
    fn false_alarms_are_rare() {
        let worst = worst_share_of_alarms(&[30], 100);
        assert!(worst <= 0.08, "{worst}");
    }

    mod long {
        use super::*;

        #[test]
        fn false_alarms_are_as_rare_as_the_p_value_says() {
            let worst = worst_share_of_alarms(&[10, 30, 100], 2_000).max(worst_share_of_alarms(&[1_000], 400));
            assert!(worst <= 0.05, "{worst}");
        }
    }

    /// One block in twenty is never freed; the others live 10 ms on average.
    #[test]
    fn a_share_that_is_never_freed_is_found() {
        let law = |random: &mut Random| match random.uniform() {
            leaked if leaked < 0.05 => 1e18,
            _ => -1e7 * random.uniform().ln(),
        };
        let mut random = Random(2);
        for (blocks, least) in [(100, 0.5), (300, 0.95)] {
            let found = (0..400).filter(|_| {
                let found = outliving(&recorded(&mut random, blocks, 10.0 * SECOND, law));
                found.is_some_and(|it| it.p_value <= 0.01 && it.beyond_seconds > 0.03 && it.older > 0)
            });
            let share = found.count() as f64 / 400.0;
            println!("{blocks} blocks: {share}");
            assert!(share >= least, "{blocks}: {share}");
        }
    }

    #[test]
    fn parts_without_frees_count_only_among_themselves() {
        let octave = |exponent, freed, left| Octave { exponent, freed, left };
        let (idle, busy) = ([octave(33, 0, 5)], [octave(20, 7, 1), octave(30, 0, 2)]);
        assert_eq!(added([&idle[..], &busy, &busy].into_iter()), [octave(20, 14, 2), octave(30, 0, 4)]);
        assert_eq!(added([&idle[..], &idle].into_iter()), [octave(33, 0, 10)]);
    }

    #[test]
    fn what_cannot_be_compared_is_not_judged() {
        let octave = |exponent, freed, left| Octave { exponent, freed, left };
        assert_eq!(outliving(&[]), None);
        assert_eq!(outliving(&[octave(20, 100, 0)]), None);
        assert_eq!(outliving(&[octave(20, 0, 50), octave(30, 0, 50)]), None, "nothing was freed");
        assert_eq!(outliving(&[octave(20, 90, 0), octave(21, 0, 10)]), None, "nothing is far beyond");
        assert_eq!(outliving(&[octave(10, 90, 0), octave(20, 0, 10)]), None, "milliseconds are nothing");
        let many = outliving(&[octave(20, u64::MAX, u64::MAX), octave(20, u64::MAX, 0), octave(30, 0, u64::MAX)]);
        assert!(many.is_some_and(|it| it.p_value < 1e-9), "{many:?}");
        assert_eq!(outliving(&[octave(20, 90, 0), octave(80, 0, 10)]), None, "no such age");
        // All were freed in the end, however late.
        let all_freed = outliving(&[octave(20, 900, 0), octave(33, 10, 0)]).expect("a comparison");
        assert_eq!((all_freed.p_value, all_freed.older), (1.0, 0));
    }

    /// 900 of 1,000 are freed in the octave that starts at 1 ms; the rest are observed through the five octaves from 4
    /// ms to 134 ms.
    #[test]
    fn the_figures_are_of_the_best_comparison() {
        let ages = [Octave { exponent: 20, freed: 900, left: 0 }, Octave { exponent: 27, freed: 0, left: 100 }];
        let found = outliving(&ages).expect("a comparison");
        assert_eq!((found.freed, found.older, found.freed_beyond), (900, 100, 0));
        assert!((found.usual_seconds - 2.097_152e-3).abs() < 1e-12, "{found:?}");
        assert!((found.beyond_seconds - 8.388_608e-3).abs() < 1e-12, "{found:?}");
        // Four octaves of 100 samples; 90 % of each should have been freed.
        assert!((found.expected_beyond - 360.0).abs() < 1e-9, "{found:?}");
        let (early, late) = (1_000.0_f64, 400.0);
        let expected = (early / (early + late)).powi(900) * 10.0;
        assert!((found.p_value / expected - 1.0).abs() < 1e-6, "{found:?} {expected:e}");
    }
}
