//! Planning: what a sampling interval would detect in a workload and what it would cost, and which interval to choose.

use serde::{Deserialize, Serialize};

use super::detect::{detection, size_seen_with};
use super::optimum::{ClassUse, cost, optimum, per_byte, per_byte_variance, variance};
use super::size_classes::{ClassInterval, LARGEST_CLASS_INTERVAL};

/// Largest sampling interval of a recording: beyond it the integer draw loses accuracy (`docs/sampling.md`).
pub const LARGEST_INTERVAL: u64 = 64 << 20;
/// Share of a budget to aim at, so that one step suffices.
pub const AIM: f64 = 0.9;
/// Cost of samples that `--interval auto` accepts, relative to the cost of probes.
const SAMPLES_PER_PROBES: f64 = 0.01;
/// The same where processes count their calls themselves, relative to the CPU time of their own work.
const SAMPLES_PER_WORK: f64 = 0.01;
/// A call site counts as detected if it is sampled with this probability.
const SEEN: f64 = 0.95;

/// The allocation behaviour of a program.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Workload {
    /// Allocations per second and live blocks by size class. Every size in a class is taken as the mean of the class.
    pub classes: Vec<ClassUse>,
    /// Bytes per second that each call site (stack) allocates.
    pub sites: Vec<f64>,
    /// Length of the planned recording in seconds. A call site is detected by what it allocates in that time.
    pub seconds: f64,
    /// Share of the allocations that the processes count themselves (inline hooks), 0 to 1. The others trap.
    pub inline_share: f64,
    /// CPU time that the processes' own work takes, in CPUs; `None` if it is unknown.
    pub work_cpus: Option<f64>,
}

/// Cost of hooks and samples in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Costs {
    /// Cost of the probes on an allocation that is not sampled, and on its free.
    pub probe_ns: f64,
    /// Cost of inline hooks on these two calls.
    pub inline_ns: f64,
    /// Additional cost of a sample in the target.
    pub sample_ns: f64,
}

/// One line of a plan: the consequences of one sampling interval.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanRow {
    /// R: the sampling interval in bytes.
    pub interval: u64,
    /// Samples per second.
    pub samples_per_second: f64,
    /// CPUs that probes keep busy, without samples.
    pub probe_cpus: f64,
    /// CPUs that inline hooks keep busy, without samples.
    pub inline_cpus: f64,
    /// CPUs that samples add.
    pub sample_cpus: f64,
    /// Bytes that a call site must allocate to be detected with a probability of 95 %.
    pub seen_from_bytes: f64,
    /// Upper end of the 95 % interval of a call site without any sample (3.689 R), in bytes.
    pub unseen_at_most_bytes: f64,
    /// Share of the workload's call sites that a recording detects with a probability of 95 %; `None` without sites.
    pub sites_seen: Option<f64>,
    /// Share of the workload's bytes in those sites; `None` without sites.
    pub bytes_seen: Option<f64>,
    /// Bytes from which the mean error of a call site's estimate is at most 20 %.
    pub within_fifth_from_bytes: f64,
}

/// The sampling interval that `--interval auto` chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Automatic {
    /// R: the sampling interval in bytes, a power of two.
    pub interval: u64,
    /// Whether samples cost no more than they may. If they do with every interval, the largest one is given.
    pub fits: bool,
}

/// Samples per second under the sampling interval R: Σ rate · (1 − qⁿ).
pub fn samples_per_second(workload: &Workload, interval: u64) -> f64 {
    cost(&workload.classes, &per_byte(&workload.classes, interval))
}

/// The lines of a plan for sampling intervals from 4 KiB to 64 MiB, each four times the previous one.
pub fn rows(workload: &Workload, costs: Costs) -> Vec<PlanRow> {
    (0..8).map(|step| row(workload, costs, 4_096 << (2 * step))).collect()
}

/// The line of a plan for one sampling interval in bytes.
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
        probe_cpus: probe_cpus(workload, costs),
        inline_cpus: calls_per_second(workload) * workload.inline_share * costs.inline_ns / 1e9,
        sample_cpus: samples * costs.sample_ns / 1e9,
        seen_from_bytes: seen_from,
        unseen_at_most_bytes: if interval == 1 { 0.0 } else { size_seen_with(0.975, interval) },
        sites_seen: has_sites.then(|| seen.len() as f64 / workload.sites.len() as f64),
        bytes_seen: has_sites.then(|| seen.iter().sum::<f64>() / total),
        within_fifth_from_bytes: size_with_error(0.2, interval),
    }
}

/// The smallest sampling interval whose samples cost at most 1 % of what the probes cost and with which, if there is a
/// `budget` (a share of the processes' CPU time), probes and samples fit it. If most calls are counted inside the
/// processes, samples are what costs: they may take 1 % of the CPU time of the processes' own work, or [`AIM`] of the
/// budget if that is less.
///
/// `None` if this depends on the CPU time of the processes, and that is unknown.
pub fn automatic(workload: &Workload, costs: Costs, budget: Option<f64>) -> Option<Automatic> {
    let most_cpus = if workload.inline_share > 0.5 {
        budget.map_or(SAMPLES_PER_WORK, |budget| SAMPLES_PER_WORK.min(AIM * budget)) * workload.work_cpus?
    } else {
        let probes = probe_cpus(workload, costs);
        let left = match budget {
            // A share s of all CPU time is s/(1 − s) of the time for the processes' own work.
            Some(budget) => budget / (1.0 - budget).max(1e-9) * workload.work_cpus? - probes,
            None => f64::INFINITY,
        };
        left.min(SAMPLES_PER_PROBES * probes)
    };
    let fits = |interval: &u64| samples_per_second(workload, *interval) * costs.sample_ns / 1e9 <= most_cpus;
    let found = (0..=LARGEST_INTERVAL.ilog2()).map(|exponent| 1_u64 << exponent).find(fits);
    Some(Automatic { interval: found.unwrap_or(LARGEST_INTERVAL), fits: found.is_some() })
}

fn probe_cpus(workload: &Workload, costs: Costs) -> f64 {
    calls_per_second(workload) * (1.0 - workload.inline_share) * costs.probe_ns / 1e9
}

fn calls_per_second(workload: &Workload) -> f64 {
    workload.classes.iter().map(|class| class.allocations).sum()
}

/// Bytes at which the mean relative error of a site of small allocations falls to `error`.
fn size_with_error(error: f64, interval: u64) -> f64 {
    // E|K − m|/m falls as √(2/(π m)), with ripples that end well below m = 1000.
    let mut size = (2.0 / (std::f64::consts::PI * error * error) * 0.5 * interval as f64) as u64;
    let step = (interval / 16).max(1);
    while detection(size.max(1), interval).is_some_and(|found| found.expected_error_binomial > error) {
        size += step;
    }
    size as f64
}

/// Optimal intervals by size class for a given number of samples: what `heapbpf plan` writes and `-i @plan.json` reads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClassPlan {
    /// Interval of each class, by ascending size.
    pub classes: Vec<ClassInterval>,
    /// Variance of the bytes in use, relative to per-byte sampling with as many samples.
    pub variance_ratio: f64,
    /// R of that per-byte sampling, in bytes.
    pub compared_with_interval_bytes: u64,
}

/// Why a plan file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ClassPlanError {
    /// Not the JSON that `heapbpf plan` writes.
    #[error("not a plan written by `heapbpf plan`: {0}")]
    Syntax(#[from] serde_json::Error),
    /// The plan names no size class.
    #[error("the plan has no size classes")]
    Empty,
    /// An interval is below 1, too large, or not a number.
    #[error(
        "the plan's interval {interval} for sizes from {from_bytes} bytes is not between 1 and {LARGEST_CLASS_INTERVAL}"
    )]
    Interval {
        /// Smallest size of the class in bytes.
        from_bytes: u64,
        /// The interval in the plan.
        interval: f64,
    },
}

impl ClassPlan {
    /// The optimal intervals for a workload at the cost of per-byte sampling with R = `interval`.
    ///
    /// One sixteenth of the samples is spent as per-byte sampling would spend it, so that classes without live blocks,
    /// or about which little is known, are sampled too. `class_start_bytes` returns the smallest size in the class of a
    /// size.
    pub fn best(workload: &Workload, interval: u64, class_start_bytes: impl Fn(f64) -> u64) -> Self {
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
                from_bytes: class_start_bytes(class.size_bytes),
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

    /// Parses a plan file and checks every number in it.
    ///
    /// # Errors
    /// The text is not such a plan, or a number in it is out of range.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn workload() -> Workload {
        let class = |size_bytes, allocations, live| ClassUse { size_bytes, allocations, live };
        Workload {
            classes: vec![class(64.0, 1e6, 10.0), class(4_096.0, 1e4, 500.0), class(1e6, 10.0, 5.0)],
            sites: vec![64e6, 40e6, 9e6, 1e6, 1e3],
            seconds: 10.0,
            ..Workload::default()
        }
    }

    const COSTS: Costs = Costs { probe_ns: 1_000.0, inline_ns: 2.0, sample_ns: 3_000.0 };

    #[test]
    fn larger_intervals_see_and_cost_less() {
        let rows = rows(&workload(), COSTS);
        assert_eq!((rows[0].interval, rows[7].interval), (4_096, LARGEST_INTERVAL));
        assert_eq!(LARGEST_INTERVAL, sampler_ebpf::constants::LARGEST_CHOSEN_INTERVAL);
        for pair in rows.windows(2) {
            assert!(pair[0].samples_per_second > pair[1].samples_per_second);
            assert!(pair[0].sites_seen >= pair[1].sites_seen && pair[0].bytes_seen >= pair[1].bytes_seen);
            assert_eq!(pair[0].probe_cpus, pair[1].probe_cpus);
        }
        assert!((rows[0].probe_cpus - 1.01001).abs() < 1e-9);
        assert_eq!(row(&Workload::default(), COSTS, 4_096).sites_seen, None);
        let half_mebibyte = row(&workload(), COSTS, 524_288);
        assert!((half_mebibyte.unseen_at_most_bytes / 524_288.0 - 3.689).abs() < 1e-3);
        // 0.2 = √(2/(π m)), so m is about 16 intervals.
        assert!((half_mebibyte.within_fifth_from_bytes / 524_288.0 - 16.0).abs() < 1.0);
    }

    #[test]
    fn automatic_is_the_smallest_that_fits() {
        let found = automatic(&workload(), COSTS, None).expect("the probes decide");
        assert!(found.fits);
        let cost = |interval| samples_per_second(&workload(), interval) * COSTS.sample_ns;
        let probes = 1_010_010.0 * COSTS.probe_ns;
        assert!(cost(found.interval) <= 0.01 * probes && cost(found.interval / 2) > 0.01 * probes);
        // Of two CPUs, the probes leave one to the programs. Alone they exceed a third.
        let busy = Workload { work_cpus: Some(1.0), ..workload() };
        let largest = Automatic { interval: LARGEST_INTERVAL, fits: false };
        assert_eq!(automatic(&busy, COSTS, Some(0.33)), Some(largest));
        let tight = automatic(&busy, COSTS, Some(0.503)).expect("the work is known");
        assert!(tight.fits && tight.interval > found.interval, "{tight:?}");
        assert_eq!(automatic(&workload(), COSTS, Some(0.33)), None, "the share of what?");
        // Nothing is allocated, so every interval fits.
        assert_eq!(automatic(&Workload::default(), COSTS, None), Some(Automatic { interval: 1, fits: true }));
    }

    #[test]
    fn where_calls_are_counted_inside_samples_may_take_a_hundredth_of_the_work() {
        let inside = |work_cpus| Workload { inline_share: 0.9, work_cpus, ..workload() };
        let cost = |interval| samples_per_second(&workload(), interval) * COSTS.sample_ns / 1e9;
        let found = automatic(&inside(Some(0.5)), COSTS, None).expect("the work is known");
        assert!(found.fits && cost(found.interval) <= 0.005 && cost(found.interval / 2) > 0.005, "{found:?}");
        let tight = automatic(&inside(Some(0.5)), COSTS, Some(0.001)).expect("the work is known");
        assert!(cost(tight.interval) <= 0.000_45 && cost(tight.interval / 2) > 0.000_45, "{tight:?}");
        assert_eq!(automatic(&inside(Some(0.5)), COSTS, Some(0.5)), Some(found), "a budget that is no limit");
        assert_eq!(automatic(&inside(None), COSTS, None), None);
        let costs = row(&inside(None), COSTS, 4_096);
        assert!((costs.probe_cpus - 0.101_001).abs() < 1e-9, "{costs:?}");
        assert!((costs.inline_cpus - 0.9 * 1_010_010.0 * 2e-9).abs() < 1e-12, "{costs:?}");
    }

    #[test]
    fn class_plans_save_variance_and_read_back() {
        let plan = ClassPlan::best(&workload(), 524_288, |size| size as u64);
        assert!(plan.variance_ratio < 1.0 && plan.variance_ratio > 0.0, "{plan:?}");
        let text = serde_json::to_string(&plan).expect("plain data");
        assert_eq!(ClassPlan::read(&text).expect("its own output"), plan);
        let taken: f64 =
            plan.classes.iter().zip(&workload().classes).map(|(class, used)| used.allocations / class.interval).sum();
        let budget = samples_per_second(&workload(), 524_288);
        assert!(taken <= budget * (1.0 + 1e-9) && taken > 0.9 * budget, "{taken} of {budget}");
        // A class without live blocks gets a sixteenth of its per-byte probability.
        let mut unused = workload();
        unused.classes[1].live = 0.0;
        let (usual, given) =
            (per_byte(&unused.classes, 524_288)[1], ClassPlan::best(&unused, 524_288, |size| size as u64).classes[1]);
        assert!((given.interval * usual / 16.0 - 1.0).abs() < 1e-9, "{given:?}");
        assert!(matches!(ClassPlan::read("{}"), Err(ClassPlanError::Syntax(_))));
        let wrong = text.replacen("\"interval\":", "\"interval\":0.5,\"was\":", 1);
        assert!(matches!(ClassPlan::read(&wrong), Err(ClassPlanError::Interval { .. })));
        let empty = r#"{"classes":[],"variance_ratio":1.0,"compared_with_interval_bytes":1}"#;
        assert!(matches!(ClassPlan::read(empty), Err(ClassPlanError::Empty)));
    }
}
