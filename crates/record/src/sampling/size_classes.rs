//! The table of trials by size class that the BPF side reads, and the controller that adapts it to the observed sizes.

use heapbpf_statistics::size_classes::{ClassInterval, class_trials, even_coverage};
use sampler_ebpf::trials::{SIZE_CLASSES, TrialTable, class_start, size_class};

/// Smallest size of a class, bytes.
fn first_size(class: usize) -> u64 {
    class_start(class).unwrap_or(u64::MAX)
}

/// Smallest size, in bytes, of the class that `size_bytes` belongs to.
pub fn first_size_like(size_bytes: f64) -> u64 {
    first_size(size_class(size_bytes as u64))
}

/// The table for given class intervals. A class without one gets that of the next smaller class that has one; below all
/// of them, that of the smallest.
pub fn trial_table(classes: &[ClassInterval]) -> TrialTable {
    let mut sorted = classes.to_vec();
    sorted.sort_by_key(|class| class.from_bytes);
    let mut table = [1; SIZE_CLASSES];
    for (index, trials) in table.iter_mut().enumerate() {
        let start = first_size(index);
        let after = sorted.partition_point(|class| class.from_bytes <= start);
        if let Some(class) = sorted.get(after.saturating_sub(1)) {
            *trials = class_trials(class.interval);
        }
    }
    table
}

/// How the sampling intervals of size classes are chosen.
#[derive(Clone, Debug, PartialEq)]
pub enum ClassRule {
    /// One sample per this many allocations overall, divided evenly among the size classes that are observed.
    Even(u64),
    /// Fixed intervals, from a plan.
    Given(Vec<ClassInterval>),
}

/// Adapts the sampling intervals of size classes to the sizes observed.
///
/// New intervals depend on past samples only, never on a countdown in progress, so every sample's weight remains
/// correct and sums of weights remain unbiased.
pub struct SizeClassController {
    rule: ClassRule,
    /// Trials per allocation of each class.
    pub table: TrialTable,
}

/// Relative change of a class's interval that justifies a new table. Smaller changes are skipped: confidence intervals
/// are only sure to hold for a class whose sampling interval never changed.
const WORTHWHILE: f64 = 1.5;

impl SizeClassController {
    /// A controller that has seen no samples yet: under [`ClassRule::Even`] every class has the overall interval.
    pub fn new(rule: ClassRule) -> Self {
        let table = match &rule {
            ClassRule::Even(overall) => [class_trials(*overall as f64); SIZE_CLASSES],
            ClassRule::Given(classes) => trial_table(classes),
        };
        Self { rule, table }
    }

    /// Redistributes the samples by `counts`, the allocations of each size class as estimated so far. A class without
    /// allocations keeps the overall interval. Returns the table if it changed.
    pub fn rebalance(&mut self, counts: &[f64; SIZE_CLASSES]) -> Option<&TrialTable> {
        let ClassRule::Even(overall) = self.rule else { return None };
        let mut changed = false;
        for class in even_coverage(counts, overall as f64, first_size) {
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

    #[test]
    fn a_class_without_an_interval_takes_that_of_the_next_smaller() {
        let named =
            [ClassInterval { from_bytes: 64, interval: 10.0 }, ClassInterval { from_bytes: 1_024, interval: 2.0 }];
        let table = trial_table(&named);
        assert_eq!(table[size_class(8)], class_trials(10.0));
        assert_eq!(table[size_class(500)], class_trials(10.0));
        assert_eq!(table[size_class(1_024)], class_trials(2.0));
        assert_eq!(table[size_class(u64::MAX)], class_trials(2.0));
    }

    #[test]
    fn the_controller_adapts_to_the_sizes_seen_and_skips_small_changes() {
        let mut controller = SizeClassController::new(ClassRule::Even(1_000));
        assert!(controller.table.iter().all(|trials| *trials == class_trials(1_000.0)));
        let mut counts = [0.0; SIZE_CLASSES];
        (counts[8], counts[20]) = (1e6, 1e4);
        let table = *controller.rebalance(&counts).expect("a rare class is sampled more");
        assert_eq!(table[8], class_trials(1e6 / 505.0));
        assert_eq!(table[20], class_trials(1e4 / 505.0));
        assert_eq!(table[30], class_trials(1_000.0), "not observed yet");
        (counts[8], counts[20]) = (1.1e6, 1.05e4);
        assert_eq!(controller.rebalance(&counts), None);
        let given = vec![ClassInterval { from_bytes: 8, interval: 7.0 }];
        assert_eq!(SizeClassController::new(ClassRule::Given(given)).rebalance(&counts), None);
    }
}
