//! What a sampling interval would see of a workload and cost it, before it is used; and which one to take.

use serde::{Deserialize, Serialize};

use super::detect::{detection, size_seen_with};
use super::optimum::{ClassUse, cost, optimum, per_byte, per_byte_variance, variance};
use super::size_classes::{ClassInterval, LARGEST_CLASS_INTERVAL};

/// Largest interval that a recording takes: beyond it the integer draw loses accuracy (`docs/sampling.md`).
pub const LARGEST_INTERVAL: u64 = 64 << 20;
/// Share of the probes' cost that samples may add under `--interval auto`.
const SAMPLES_PER_PROBES: f64 = 0.01;
/// A site is called seen if it shows up in so many of 100 recordings.
const SEEN: f64 = 0.95;

/// What a program allocates.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Workload {
    /// Allocations a second by size, and live blocks by size. All sizes of a class count as its mean.
    pub classes: Vec<ClassUse>,
    /// Bytes that each site (stack) allocates a second.
    pub sites: Vec<f64>,
    /// Seconds that a recording is to take: what a site allocates in that time has to be seen.
    pub seconds: f64,
}

/// What probes and samples cost, nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Costs {
    /// An allocation that is not sampled, and its free.
    pub probe_ns: f64,
    /// What a sample adds, in the target's own time.
    pub sample_ns: f64,
}

/// One interval's line of the plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanRow {
    /// R, in bytes.
    pub interval: u64,
    /// Samples a second.
    pub samples_per_second: f64,
    /// CPUs that probes keep busy, samples left out.
    pub probe_cpus: f64,
    /// CPUs that samples add.
    pub sample_cpus: f64,
    /// Bytes that a site must allocate to be seen with 95 %.
    pub seen_from_bytes: f64,
    /// Upper end of the 95 % interval of a site of which nothing is seen (3.689 R).
    pub unseen_at_most_bytes: f64,
    /// Share of the workload's sites that are seen with 95 % in a recording; `None` without sites.
    pub sites_seen: Option<f64>,
    /// Share of bytes that is in those sites.
    pub bytes_seen: Option<f64>,
    /// Bytes from which on a site's estimate is off by 20 % on average or less.
    pub within_fifth_from_bytes: f64,
}

/// The interval for `--interval auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Automatic {
    /// R, in bytes: a power of two.
    pub interval: u64,
    /// Whether probes and samples fit the budget. If not even the largest interval does, that one is given.
    pub fits: bool,
}

/// Samples a second under the interval R: Σ rate · (1 − qⁿ).
pub fn samples_per_second(workload: &Workload, interval: u64) -> f64 {
    cost(&workload.classes, &per_byte(&workload.classes, interval))
}

/// The plan's lines for intervals of 4 KiB to 64 MiB, by fours.
pub fn rows(workload: &Workload, costs: Costs) -> Vec<PlanRow> {
    (0..8).map(|step| row(workload, costs, 4_096 << (2 * step))).collect()
}

/// One line.
pub fn row(workload: &Workload, costs: Costs, interval: u64) -> PlanRow {
    let samples = samples_per_second(workload, interval);
    let recorded = |rate: &f64| rate * workload.seconds;
    let seen_from = size_seen_with(SEEN, interval);
    let total: f64 = workload.sites.iter().sum();
    let seen: Vec<f64> = workload.sites.iter().copied().filter(|rate| recorded(rate) >= seen_from).collect();
    let has_sites = total > 0.0;
    PlanRow {
        interval,
        samples_per_second: samples,
        probe_cpus: calls_per_second(workload) * costs.probe_ns / 1e9,
        sample_cpus: samples * costs.sample_ns / 1e9,
        seen_from_bytes: seen_from,
        unseen_at_most_bytes: if interval == 1 { 0.0 } else { size_seen_with(0.975, interval) },
        sites_seen: has_sites.then(|| seen.len() as f64 / workload.sites.len() as f64),
        bytes_seen: has_sites.then(|| seen.iter().sum::<f64>() / total),
        within_fifth_from_bytes: size_with_error(0.2, interval),
    }
}

/// The smallest interval whose samples cost under 1 % of the probes, and, with a `budget` in CPUs, fit that.
pub fn automatic(workload: &Workload, costs: Costs, budget_cpus: Option<f64>) -> Automatic {
    let probes = calls_per_second(workload) * costs.probe_ns / 1e9;
    for exponent in 0..=LARGEST_INTERVAL.ilog2() {
        let interval = 1 << exponent;
        let samples = samples_per_second(workload, interval) * costs.sample_ns / 1e9;
        if samples <= SAMPLES_PER_PROBES * probes && budget_cpus.is_none_or(|budget| probes + samples <= budget) {
            return Automatic { interval, fits: true };
        }
    }
    Automatic { interval: LARGEST_INTERVAL, fits: budget_cpus.is_none_or(|budget| probes <= budget) }
}

fn calls_per_second(workload: &Workload) -> f64 {
    workload.classes.iter().map(|class| class.allocations).sum()
}

/// Bytes at which the mean error of small allocations falls to `error` of the true value.
fn size_with_error(error: f64, interval: u64) -> f64 {
    // E|K − m|/m falls as √(2/(π m)); its ripples end well below m = 1000.
    let mut size = (2.0 / (std::f64::consts::PI * error * error) * 0.5 * interval as f64) as u64;
    let step = (interval / 16).max(1);
    while detection(size.max(1), interval).is_some_and(|found| found.expected_error_binomial > error) {
        size += step;
    }
    size as f64
}

/// Intervals by size class: the best for the same number of samples, as `heapbpf plan` writes and `-i @plan.json` reads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClassPlan {
    /// Interval of each class, ascending.
    pub classes: Vec<ClassInterval>,
    /// Variance of the bytes in use relative to per-byte sampling that takes as many samples.
    pub variance_ratio: f64,
    /// R of that per-byte sampling.
    pub compared_with_interval_bytes: u64,
}

/// Why a plan file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ClassPlanError {
    /// Not the JSON that `heapbpf plan` writes.
    #[error("not a plan written by `heapbpf plan`: {0}")]
    Syntax(#[from] serde_json::Error),
    /// No class.
    #[error("the plan names no size class")]
    Empty,
    /// An interval below 1, above the largest, or no number.
    #[error(
        "the plan's interval {interval} for sizes from {from_bytes} bytes is not between 1 and {LARGEST_CLASS_INTERVAL}"
    )]
    Interval {
        /// The class.
        from_bytes: u64,
        /// What it says.
        interval: f64,
    },
}

impl ClassPlan {
    /// The best intervals for a workload at the cost of per-byte sampling with R = `interval`.
    ///
    /// A sixteenth of the samples is taken as per-byte sampling would: a class that nothing was live of, or little was
    /// known of, is seen all the same.
    pub fn best(workload: &Workload, interval: u64) -> Self {
        const PER_BYTE: f64 = 1.0 / 16.0;
        let classes = &workload.classes;
        let budget = samples_per_second(workload, interval);
        let found = optimum(classes, budget * (1.0 - PER_BYTE));
        let probabilities: Vec<f64> = found
            .probabilities
            .iter()
            .zip(per_byte(classes, interval))
            .map(|(best, per_byte)| (best + PER_BYTE * per_byte).min(1.0))
            .collect();
        let mut intervals: Vec<ClassInterval> = classes
            .iter()
            .zip(&probabilities)
            .map(|(class, p)| ClassInterval {
                from_bytes: class_start_of(class.size_bytes),
                interval: (1.0 / p).clamp(1.0, LARGEST_CLASS_INTERVAL),
            })
            .collect();
        intervals.sort_by_key(|class| class.from_bytes);
        let per_byte_variance = per_byte_variance(classes, interval);
        let best = variance(classes, &probabilities);
        Self {
            classes: intervals,
            variance_ratio: if per_byte_variance > 0.0 { best / per_byte_variance } else { 1.0 },
            compared_with_interval_bytes: interval,
        }
    }

    /// Reads a plan file, every number checked.
    pub fn read(text: &str) -> Result<Self, ClassPlanError> {
        let plan: Self = serde_json::from_str(text)?;
        if plan.classes.is_empty() {
            return Err(ClassPlanError::Empty);
        }
        for &ClassInterval { from_bytes, interval } in &plan.classes {
            if !(1.0..=LARGEST_CLASS_INTERVAL).contains(&interval) {
                return Err(ClassPlanError::Interval { from_bytes, interval });
            }
        }
        Ok(plan)
    }
}

fn class_start_of(size: f64) -> u64 {
    let class = sampler_ebpf::trials::size_class(size as u64);
    sampler_ebpf::trials::class_start(class).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workload() -> Workload {
        let class = |size_bytes, allocations, live| ClassUse { size_bytes, allocations, live };
        Workload {
            classes: vec![class(64.0, 1e6, 10.0), class(4_096.0, 1e4, 500.0), class(1e6, 10.0, 5.0)],
            sites: vec![64e6, 40e6, 9e6, 1e6, 1e3],
            seconds: 10.0,
        }
    }

    const COSTS: Costs = Costs { probe_ns: 1_000.0, sample_ns: 3_000.0 };

    #[test]
    fn larger_intervals_see_and_cost_less() {
        let rows = rows(&workload(), COSTS);
        assert_eq!((rows[0].interval, rows[7].interval), (4_096, LARGEST_INTERVAL));
        for pair in rows.windows(2) {
            assert!(pair[0].samples_per_second > pair[1].samples_per_second);
            assert!(pair[0].sites_seen >= pair[1].sites_seen && pair[0].bytes_seen >= pair[1].bytes_seen);
            assert_eq!(pair[0].probe_cpus, pair[1].probe_cpus);
        }
        assert!((rows[0].probe_cpus - 1.01001).abs() < 1e-9);
        assert_eq!(row(&Workload::default(), COSTS, 4_096).sites_seen, None);
        let half_mebibyte = row(&workload(), COSTS, 524_288);
        assert!((half_mebibyte.unseen_at_most_bytes / 524_288.0 - 3.689).abs() < 1e-3);
        // 0.2 = √(2/(π m)): about 16 intervals.
        assert!((half_mebibyte.within_fifth_from_bytes / 524_288.0 - 16.0).abs() < 1.0);
    }

    #[test]
    fn automatic_is_the_smallest_that_fits() {
        let found = automatic(&workload(), COSTS, None);
        assert!(found.fits);
        let cost = |interval| samples_per_second(&workload(), interval) * COSTS.sample_ns;
        let probes = 1_010_010.0 * COSTS.probe_ns;
        assert!(cost(found.interval) <= 0.01 * probes && cost(found.interval / 2) > 0.01 * probes);
        // Probes alone are over this budget.
        assert_eq!(automatic(&workload(), COSTS, Some(0.5)), Automatic { interval: LARGEST_INTERVAL, fits: false });
        assert!(automatic(&workload(), COSTS, Some(1.012)).interval > found.interval);
        // Nothing is allocated: anything will do.
        assert_eq!(automatic(&Workload::default(), COSTS, None), Automatic { interval: 1, fits: true });
    }

    #[test]
    fn class_plans_save_variance_and_read_back() {
        let plan = ClassPlan::best(&workload(), 524_288);
        assert!(plan.variance_ratio < 1.0 && plan.variance_ratio > 0.0, "{plan:?}");
        let text = serde_json::to_string(&plan).expect("plain data");
        assert_eq!(ClassPlan::read(&text).expect("its own output"), plan);
        let taken: f64 =
            plan.classes.iter().zip(&workload().classes).map(|(class, used)| used.allocations / class.interval).sum();
        let budget = samples_per_second(&workload(), 524_288);
        assert!(taken <= budget * (1.0 + 1e-9) && taken > 0.9 * budget, "{taken} of {budget}");
        // Of a class that nothing is live of a sixteenth of the usual share is seen.
        let mut unused = workload();
        unused.classes[1].live = 0.0;
        let (usual, given) = (per_byte(&unused.classes, 524_288)[1], ClassPlan::best(&unused, 524_288).classes[1]);
        assert!((given.interval * usual / 16.0 - 1.0).abs() < 1e-9, "{given:?}");
        assert!(matches!(ClassPlan::read("{}"), Err(ClassPlanError::Syntax(_))));
        let wrong = text.replacen("\"interval\":", "\"interval\":0.5,\"was\":", 1);
        assert!(matches!(ClassPlan::read(&wrong), Err(ClassPlanError::Interval { .. })));
        let empty = r#"{"classes":[],"variance_ratio":1.0,"compared_with_interval_bytes":1}"#;
        assert!(matches!(ClassPlan::read(empty), Err(ClassPlanError::Empty)));
    }
}
