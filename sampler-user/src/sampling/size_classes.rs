//! Sampling intervals per size class: from probabilities or shares to the table of trials that the kernel side reads.

use serde::{Deserialize, Serialize};

use sampler_ebpf::trials::{SIZE_CLASSES, TrialTable, class_start, size_class};

use super::weight::log_q;

/// Common sampling interval R of size-class sampling: so large that a whole number of trials meets a class's interval to
/// a relative error of 7.5e-9 times that interval, and small enough for the draw.
pub const CLASS_INTERVAL: u64 = 1 << 26;
/// Largest interval of a class, in allocations.
pub const LARGEST_CLASS_INTERVAL: f64 = 67_108_864.0;
/// Trials that no draw exceeds (44.4 R): a class with them is always sampled.
const ALWAYS: u64 = 45 * CLASS_INTERVAL;

/// A class and one sample in how many of its allocations: what `heapbpf plan` writes and `--interval @plan.json` reads.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClassInterval {
    /// Smallest size of the class, bytes.
    pub from_bytes: u64,
    /// Mean allocations between samples, at least 1.
    pub interval: f64,
}

/// Trials per allocation that make an allocation be sampled with probability 1/`interval`: n with 1 − qⁿ = 1/R_c.
/// Intervals are kept within 1 and [`LARGEST_CLASS_INTERVAL`].
pub fn class_trials(interval: f64) -> u64 {
    if interval.is_nan() || interval <= 1.0 {
        return ALWAYS;
    }
    let interval = interval.min(LARGEST_CLASS_INTERVAL);
    let trials = (-1.0 / interval).ln_1p() / log_q(CLASS_INTERVAL);
    (trials.round() as u64).clamp(1, ALWAYS)
}

/// The table for given class intervals; a class that is not named gets the interval of the nearest smaller one that is,
/// or of the smallest.
pub fn trial_table(classes: &[ClassInterval]) -> TrialTable {
    let mut sorted = classes.to_vec();
    sorted.sort_by_key(|class| class.from_bytes);
    let mut table = [1; SIZE_CLASSES];
    for (index, trials) in table.iter_mut().enumerate() {
        let start = class_start(index).unwrap_or(u64::MAX);
        let after = sorted.partition_point(|class| class.from_bytes <= start);
        if let Some(class) = sorted.get(after.saturating_sub(1)) {
            *trials = class_trials(class.interval);
        }
    }
    table
}

/// Even coverage: one sample in `overall` allocations, divided evenly among the classes in use. With shares s_c of m
/// classes: R_c = max(1, overall · m · s_c); what a rare class cannot use goes to the others.
///
/// `counts` holds allocations by size class; the result has one entry for each class in use.
pub fn even_coverage(counts: &[f64; SIZE_CLASSES], overall: f64) -> Vec<ClassInterval> {
    let mut used: Vec<(usize, f64)> = counts.iter().copied().enumerate().filter(|(_, count)| *count > 0.0).collect();
    let total: f64 = used.iter().map(|(_, count)| count).sum();
    used.sort_by(|a, b| a.1.total_cmp(&b.1));
    // Samples left to divide, the rarest class first: it takes at most all of its own.
    let mut budget = total / overall.max(1.0);
    let mut classes: Vec<ClassInterval> = Vec::with_capacity(used.len());
    for (position, &(class, count)) in used.iter().enumerate() {
        let share = budget / (used.len() - position) as f64;
        let samples = share.min(count);
        budget -= samples;
        let from_bytes = class_start(class).unwrap_or(u64::MAX);
        classes.push(ClassInterval { from_bytes, interval: (count / samples).clamp(1.0, LARGEST_CLASS_INTERVAL) });
    }
    classes.sort_by_key(|class| class.from_bytes);
    classes
}

/// How size classes get their intervals.
#[derive(Clone, Debug, PartialEq)]
pub enum ClassRule {
    /// One sample in so many allocations overall, divided evenly among the classes in use as they are seen.
    Even(u64),
    /// These, from a plan.
    Given(Vec<ClassInterval>),
}

/// The intervals of size classes in force, adapted to what is allocated.
///
/// What a class gets depends on samples of the past alone, never on a countdown under way, so each sample's own weight
/// stays right and sums of them unbiased.
pub struct ClassSteering {
    rule: ClassRule,
    table: TrialTable,
}

/// Relative change of a class's interval that is worth a new table. A class whose interval stays has an honest interval
/// of its counts, so small changes are not made.
const WORTHWHILE: f64 = 1.5;

impl ClassSteering {
    /// At the start nothing is known of the classes in use: the overall interval for each.
    pub fn new(rule: ClassRule) -> Self {
        let table = match &rule {
            ClassRule::Even(overall) => [class_trials(*overall as f64); SIZE_CLASSES],
            ClassRule::Given(classes) => trial_table(classes),
        };
        Self { rule, table }
    }

    /// Trials per allocation of each class.
    pub fn table(&self) -> &TrialTable {
        &self.table
    }

    /// Shares samples anew by `counts`, allocations by size class as estimated so far. A class not seen yet keeps the
    /// overall interval. Returns the table if it changed.
    pub fn reshare(&mut self, counts: &[f64; SIZE_CLASSES]) -> Option<&TrialTable> {
        let ClassRule::Even(overall) = self.rule else { return None };
        let mut changed = false;
        for class in even_coverage(counts, overall as f64) {
            let trials = class_trials(class.interval);
            let now = &mut self.table[size_class(class.from_bytes)];
            let ratio = trials as f64 / *now as f64;
            if !(1.0 / WORTHWHILE..=WORTHWHILE).contains(&ratio) {
                *now = trials;
                changed = true;
            }
        }
        changed.then_some(&self.table)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::weight::inclusion;

    #[test]
    fn trials_give_the_interval() {
        for interval in [1.5, 2.0, 10.0, 1_000.0, 65_536.0] {
            let weight = inclusion(class_trials(interval), CLASS_INTERVAL).expect("sampled").weight;
            assert!((weight / interval - 1.0).abs() < interval * 1e-8, "{interval}: {weight}");
        }
        for always in [1.0, 0.0, f64::NAN] {
            let weight = inclusion(class_trials(always), CLASS_INTERVAL).expect("sampled").weight;
            assert!((weight - 1.0).abs() < 1e-15);
        }
        assert_eq!(class_trials(f64::INFINITY), 1);
    }

    #[test]
    fn classes_that_are_not_named_follow_the_next_smaller() {
        let named =
            [ClassInterval { from_bytes: 64, interval: 10.0 }, ClassInterval { from_bytes: 1_024, interval: 2.0 }];
        let table = trial_table(&named);
        assert_eq!(table[size_class(8)], class_trials(10.0));
        assert_eq!(table[size_class(500)], class_trials(10.0));
        assert_eq!(table[size_class(1_024)], class_trials(2.0));
        assert_eq!(table[size_class(u64::MAX)], class_trials(2.0));
    }

    #[test]
    fn steering_follows_what_is_allocated_and_leaves_small_changes() {
        let mut steering = ClassSteering::new(ClassRule::Even(1_000));
        assert!(steering.table().iter().all(|trials| *trials == class_trials(1_000.0)));
        let mut counts = [0.0; SIZE_CLASSES];
        (counts[8], counts[20]) = (1e6, 1e4);
        let table = *steering.reshare(&counts).expect("a rare class is sampled more");
        assert_eq!(table[8], class_trials(1e6 / 505.0));
        assert_eq!(table[20], class_trials(1e4 / 505.0));
        assert_eq!(table[30], class_trials(1_000.0), "not seen yet");
        (counts[8], counts[20]) = (1.1e6, 1.05e4);
        assert_eq!(steering.reshare(&counts), None);
        let given = vec![ClassInterval { from_bytes: 8, interval: 7.0 }];
        assert_eq!(ClassSteering::new(ClassRule::Given(given)).reshare(&counts), None);
    }

    #[test]
    fn coverage_is_even_and_costs_what_was_asked() {
        let mut counts = [0.0; SIZE_CLASSES];
        (counts[8], counts[20], counts[40]) = (1e6, 1e4, 20.0);
        let classes = even_coverage(&counts, 1_000.0);
        let samples: Vec<f64> = classes.iter().zip([1e6, 1e4, 20.0]).map(|(class, n)| n / class.interval).collect();
        assert!((samples.iter().sum::<f64>() - 1_010.02).abs() < 1e-6, "{samples:?}");
        assert_eq!(samples[2], 20.0, "a rare class is sampled whole");
        assert!((samples[0] / samples[1] - 1.0).abs() < 1e-12);
    }
}
