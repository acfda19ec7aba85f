//! Estimates with a confidence interval, or with the reason why there is none.

use serde::Serialize;

pub use super::interval::Part;
use super::interval::{self, Interval, Sampled};
use super::weight::trials_of_weight;
use crate::criterion::Criterion;

/// A figure estimated from samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Estimate {
    /// The unbiased estimate.
    pub estimate: f64,
    /// Lower end of the confidence interval.
    pub low: Option<f64>,
    /// Upper end of the confidence interval.
    pub high: Option<f64>,
    /// The exact value, if it was counted as well.
    pub exact: Option<u64>,
    /// Why there is no interval.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'static str>,
}

/// Reason: there are no parts, so no sampling interval bounds what was not sampled.
pub const NO_INTERVAL_KNOWN: &str = "nothing was sampled";
/// Reason for counts whose samples have different sizes.
pub const MIXED_SIZES: &str = "sizes are mixed, so any number of small allocations may have been missed";
/// Reason for counts with one sample.
pub const SINGLE_SAMPLE: &str = "a single sample does not show whether sizes vary";
/// Reason for bytes whose samples have different sizes, under a criterion other than bytes.
pub const MIXED_SIZES_NOT_BYTES: &str = "sampled by allocations: bytes have an interval only if all sizes are equal";
/// Reason: there is no sample, and the criterion's trials do not bound the figure.
pub const UNSEEN_NOT_BOUNDED: &str = "no sample, and this criterion does not bound what was not seen";
/// Reason: offsets say nothing about bytes under a criterion other than bytes.
pub const OFFSETS_NEED_BYTES: &str = "the offset form needs the criterion `bytes`";
/// Reason: samples have no offsets, as those of another profiler and of mappings that were unmapped in part.
pub const NO_OFFSETS: &str = "the offsets of the samples are not known";
/// Reason: all samples have one size, but the interval of its size class changed.
pub const CLASS_INTERVAL_CHANGED: &str = "the size class's interval changed during the recording";

impl Estimate {
    fn with_interval(estimate: f64, interval: Interval) -> Self {
        Self { estimate, low: Some(interval.low), high: Some(interval.high), exact: None, reason: None }
    }

    fn without_interval(estimate: f64, reason: &'static str) -> Self {
        Self { estimate, low: None, high: None, exact: None, reason: Some(reason) }
    }

    /// The sum of independent parts, with its interval by MOVER or the first reason why a part has none.
    fn combine(total: f64, mut parts: impl Iterator<Item = (f64, Result<Interval, &'static str>)>) -> Self {
        let Some(first) = parts.next() else { return Self::without_interval(total, NO_INTERVAL_KNOWN) };
        let second = parts.next();
        if second.is_none() {
            // The interval of a single part stays exact to the last digit.
            return first.1.map_or_else(
                |reason| Self::without_interval(total, reason),
                |interval| Self::with_interval(total, interval),
            );
        }
        let all = std::iter::once(first).chain(second).chain(parts);
        let intervals: Result<Vec<_>, _> = all.map(|(estimate, interval)| Ok((estimate, interval?))).collect();
        match intervals {
            Ok(intervals) => Self::with_interval(total, interval::sum(intervals).1),
            Err(reason) => Self::without_interval(total, reason),
        }
    }
}

/// Estimates bytes: the unbiased total of all parts, with its RB-NB interval ([`interval::from_sizes`]) at the
/// confidence level `confidence` (for example 0.95).
///
/// Under a criterion other than [`Criterion::Bytes`] there is an interval only if all samples have one size.
pub fn bytes(parts: &[Part<'_>], criterion: Criterion, confidence: f64) -> Estimate {
    // The sum of nothing is −0.
    let total = parts.iter().map(|part| part.sums.bytes).sum::<f64>() + 0.0;
    let size = common_size(parts);
    Estimate::combine(total, parts.iter().map(|part| (part.sums.bytes, part_bytes(part, criterion, size, confidence))))
}

/// Estimates bytes where each sample contributes only a part of its size, such as the part in memory, with the interval
/// [`interval::from_variance`]. Trials must be bytes.
pub fn parts_of_blocks(parts: &[Part<'_>], criterion: Criterion, confidence: f64) -> Estimate {
    let total = parts.iter().map(|part| part.sums.bytes).sum::<f64>() + 0.0;
    let interval = |part: &Part<'_>| {
        let is_bounded = criterion == Criterion::Bytes || part.interval == 1;
        is_bounded.then(|| interval::from_variance(part, confidence)).ok_or(UNSEEN_NOT_BOUNDED)
    };
    Estimate::combine(total, parts.iter().map(|part| (part.sums.bytes, interval(part))))
}

/// Confidence interval of bytes from the samples' offsets ([`interval::from_offsets`]), whose coverage is guaranteed
/// for every mix of sizes.
///
/// Each of k parts gets α/k of the error probability (Bonferroni), and the ends are added. This holds however the parts
/// depend on each other.
///
/// # Errors
/// The reason why there is no interval: no part, a criterion other than [`Criterion::Bytes`], or an unknown offset.
pub fn guaranteed_bytes(parts: &[Part<'_>], criterion: Criterion, confidence: f64) -> Result<Interval, &'static str> {
    if parts.is_empty() {
        return Err(NO_INTERVAL_KNOWN);
    }
    if criterion != Criterion::Bytes && parts.iter().any(|part| part.interval != 1) {
        return Err(OFFSETS_NEED_BYTES);
    }
    let each = 1.0 - (1.0 - confidence) / parts.len() as f64;
    let mut whole = Interval { low: 0.0, high: 0.0 };
    for Part { interval, sums, lost, .. } in parts {
        // If everything is sampled, nothing is skipped.
        let unskipped = sums.unskipped().or((*interval == 1).then_some(sums.sampled_bytes)).ok_or(NO_OFFSETS)?;
        let samples = sums.sized_samples().saturating_add(*lost);
        let ends = interval::from_offsets(samples, unskipped as f64, sums.sampled_bytes as f64, *interval, each);
        whole.low += ends.low;
        whole.high += ends.high;
    }
    Ok(whole)
}

/// Estimates the number of allocations: the unbiased total of all parts.
///
/// It has an interval only if all samples have one size: otherwise any number of small allocations may have gone
/// unsampled. Under [`Criterion::Allocations`] it always has one.
pub fn objects(parts: &[Part<'_>], criterion: Criterion, confidence: f64) -> Estimate {
    let total = parts.iter().map(|part| part.sums.objects).sum::<f64>() + 0.0;
    let size = common_size(parts);
    Estimate::combine(
        total,
        parts.iter().map(|part| (part.sums.objects, part_objects(part, criterion, size, confidence))),
    )
}

/// What the samples say about the sizes of the allocations.
#[derive(Clone, Copy)]
enum Size {
    None,
    Single,
    One(u64),
    Mixed,
}

fn common_size(parts: &[Part<'_>]) -> Size {
    let (mut samples, mut smallest, mut largest) = (0_u64, u64::MAX, 0);
    for sums in parts.iter().map(|part| part.sums) {
        if sums.samples > 0 {
            smallest = smallest.min(sums.smallest_bytes);
        }
        largest = largest.max(sums.largest_bytes);
        samples = samples.saturating_add(sums.samples);
    }
    match samples {
        0 => Size::None,
        _ if smallest != largest => Size::Mixed,
        1 => Size::Single,
        _ => Size::One(largest),
    }
}

fn part_bytes(part: &Part<'_>, criterion: Criterion, size: Size, confidence: f64) -> Result<Interval, &'static str> {
    let sums = part.sums;
    if criterion == Criterion::Bytes || part.interval == 1 {
        let samples = sums.sized_samples().saturating_add(part.lost);
        let sampled = Sampled { samples, sum: sums.sampled_bytes as f64, estimate: sums.bytes };
        return Ok(interval::from_sizes(sampled, part.interval, confidence));
    }
    match size {
        Size::None => Err(UNSEEN_NOT_BOUNDED),
        Size::Mixed => Err(MIXED_SIZES_NOT_BYTES),
        Size::Single => Err(SINGLE_SAMPLE),
        // Only parts of them count.
        Size::One(size) if sums.sampled_bytes < size.saturating_mul(sums.samples) => Err(MIXED_SIZES_NOT_BYTES),
        Size::One(size) => {
            let objects = one_size_objects(part, criterion, size, confidence)?;
            let size = size as f64;
            Ok(Interval { low: objects.low * size, high: objects.high * size })
        }
    }
}

fn part_objects(part: &Part<'_>, criterion: Criterion, size: Size, confidence: f64) -> Result<Interval, &'static str> {
    if part.interval == 1 {
        return Ok(Interval { low: part.sums.objects, high: part.sums.objects });
    }
    if criterion == Criterion::Allocations {
        return Ok(trial_interval(part, 1.0, confidence));
    }
    match size {
        // Every allocation takes at least one trial, so a bound on trials bounds the number of allocations.
        Size::None if criterion == Criterion::Bytes => Ok(trial_interval(part, 1.0, confidence)),
        Size::None => Err(UNSEEN_NOT_BOUNDED),
        Size::Mixed => Err(MIXED_SIZES),
        Size::Single => Err(SINGLE_SAMPLE),
        Size::One(size) => one_size_objects(part, criterion, size, confidence),
    }
}

/// Interval of the number of allocations that all have `size` bytes.
fn one_size_objects(
    part: &Part<'_>,
    criterion: Criterion,
    size: u64,
    confidence: f64,
) -> Result<Interval, &'static str> {
    let trials = match criterion {
        Criterion::Bytes => size.max(1) as f64,
        Criterion::Allocations => 1.0,
        Criterion::SizeClass => class_trials(part)?,
    };
    Ok(trial_interval(part, trials, confidence))
}

/// Trials per allocation of a part whose samples all have the same weight.
fn class_trials(part: &Part<'_>) -> Result<f64, &'static str> {
    let sums = part.sums;
    if sums.samples == 0 {
        return Err(UNSEEN_NOT_BOUNDED);
    }
    let weight = sums.objects / sums.samples as f64;
    // Σ w (w − 1) is least when all weights are equal.
    let least = sums.objects * (weight - 1.0);
    if (sums.objects_variance - least).abs() > 1e-6 * sums.objects * weight {
        return Err(CLASS_INTERVAL_CHANGED);
    }
    // Weight 1: every allocation of the class is sampled.
    Ok(trials_of_weight(weight, part.interval).unwrap_or(f64::INFINITY))
}

/// RB-NB interval of a number of allocations that take `trials` trials each.
fn trial_interval(part: &Part<'_>, trials: f64, confidence: f64) -> Interval {
    let sums = part.sums;
    if trials.is_infinite() {
        return Interval { low: sums.objects, high: sums.objects };
    }
    let samples = sums.samples.saturating_add(part.lost);
    let sampled = Sampled { samples, sum: sums.samples as f64 * trials, estimate: sums.objects * trials };
    let in_trials = interval::from_sizes(sampled, part.interval, confidence);
    Interval { low: in_trials.low / trials, high: in_trials.high / trials }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sums::SampleSums;

    fn sums(interval: u64, sizes: &[u64]) -> SampleSums {
        let mut sums = SampleSums::default();
        for &size in sizes {
            sums.record(size, size.max(1), 0, interval);
        }
        sums
    }

    fn ends(estimate: Estimate) -> (f64, f64) {
        (estimate.low.expect("has an interval"), estimate.high.expect("has an interval"))
    }

    #[test]
    fn everything_sampled_is_exact() {
        let all = sums(1, &[0, 3, 100]);
        let parts = [Part::new(1, &all)];
        let estimate = bytes(&parts, Criterion::Bytes, 0.95);
        assert_eq!((estimate.estimate, ends(estimate)), (103.0, (103.0, 103.0)));
        let count = objects(&parts, Criterion::Bytes, 0.95);
        assert_eq!((count.estimate, ends(count)), (3.0, (3.0, 3.0)));
    }

    #[test]
    fn counts_need_one_size() {
        let same = sums(1_000, &[64, 64, 64]);
        let count = objects(&[Part::new(1_000, &same)], Criterion::Bytes, 0.95);
        let size = bytes(&[Part::new(1_000, &same)], Criterion::Bytes, 0.95);
        assert!((ends(count).0 * 64.0 - ends(size).0).abs() < 1e-6);
        assert!((ends(count).1 * 64.0 - ends(size).1).abs() < 1e-6);
        let mixed = sums(1_000, &[64, 65]);
        let count = objects(&[Part::new(1_000, &mixed)], Criterion::Bytes, 0.95);
        assert_eq!((count.low, count.high, count.reason), (None, None, Some(MIXED_SIZES)));
        let single = sums(1_000, &[64]);
        let count = objects(&[Part::new(1_000, &single)], Criterion::Bytes, 0.95);
        assert_eq!(count.reason, Some(SINGLE_SAMPLE));
    }

    /// Of mappings, only what was written to counts.
    #[test]
    fn bytes_of_blocks_that_count_in_part_need_trials_of_bytes() {
        let mut partly = SampleSums::default();
        for _ in 0..3 {
            partly.record(64, 1, 0, 1_000);
        }
        let of = |sums: &SampleSums| bytes(&[Part::new(1_000, sums)], Criterion::Allocations, 0.95);
        assert!(of(&partly).low.is_some());
        (partly.sampled_bytes, partly.bytes) = (100, partly.bytes * 100.0 / 192.0);
        assert_eq!((of(&partly).low, of(&partly).reason), (None, Some(MIXED_SIZES_NOT_BYTES)));
        let parts = [Part::new(1_000, &partly)];
        assert!(bytes(&parts, Criterion::Bytes, 0.95).low.is_some());
        assert!(objects(&parts, Criterion::Allocations, 0.95).low.is_some(), "their number is known");
    }

    #[test]
    fn zero_byte_samples_count_only_as_objects() {
        let zeros = sums(1_000, &[0, 0]);
        let parts = [Part::new(1_000, &zeros)];
        assert_eq!(bytes(&parts, Criterion::Bytes, 0.95).estimate, 0.0);
        assert!((ends(bytes(&parts, Criterion::Bytes, 0.95)).1 - 3_688.879).abs() < 1e-3);
        let count = objects(&parts, Criterion::Bytes, 0.95);
        assert!((count.estimate - 2_000.0).abs() < 1e-6 && count.low.is_some());
    }

    #[test]
    fn several_intervals_combine_in_squares() {
        let (fine, coarse) = (sums(100, &[64, 64]), sums(10_000, &[64]));
        let (a, b) = (Part::new(100, &fine), Part::new(10_000, &coarse));
        let whole = bytes(&[a, b], Criterion::Bytes, 0.95);
        let (one, two) = (bytes(&[a], Criterion::Bytes, 0.95), bytes(&[b], Criterion::Bytes, 0.95));
        let expected = (ends(one).1 - one.estimate).hypot(ends(two).1 - two.estimate);
        assert!((ends(whole).1 - whole.estimate - expected).abs() < 1e-6 * expected);
        assert!(ends(whole).0 >= 192.0 - 1e-9, "at least what was seen");
    }

    #[test]
    fn guaranteed_ends_need_bytes_as_trials_and_add_up() {
        let (fine, coarse) = (sums(100, &[64, 64]), sums(10_000, &[64]));
        let (a, b) = (Part::new(100, &fine), Part::new(10_000, &coarse));
        let of = |parts: &[Part<'_>], confidence| guaranteed_bytes(parts, Criterion::Bytes, confidence).expect("bytes");
        assert_eq!(of(&[a], 0.95), interval::from_offsets(2, 128.0, 128.0, 100, 0.95));
        let (whole, one, two) = (of(&[a, b], 0.95), of(&[a], 0.975), of(&[b], 0.975));
        assert!((whole.low - one.low - two.low).abs() < 1e-9 && (whole.high - one.high - two.high).abs() < 1e-9);
        assert!(whole.low >= 192.0);
        assert_eq!(guaranteed_bytes(&[a], Criterion::Allocations, 0.95), Err(OFFSETS_NEED_BYTES));
        assert_eq!(guaranteed_bytes(&[], Criterion::Bytes, 0.95), Err(NO_INTERVAL_KNOWN));
        let all = sums(1, &[5]);
        let all = Part::new(1, &all);
        assert_eq!(guaranteed_bytes(&[all], Criterion::Allocations, 0.95), Ok(Interval { low: 5.0, high: 5.0 }));
    }

    /// One sample without an offset is enough, but if everything is sampled none is needed.
    #[test]
    fn without_offsets_nothing_from_offsets_is_claimed() {
        let unknown = |interval| {
            let mut sums = sums(interval, &[64; 100]);
            sums.record(64, 640, SampleSums::UNKNOWN_OFFSET, interval);
            sums.add(&self::sums(interval, &[64]));
            sums
        };
        let (all, some) = (unknown(1), unknown(1_000));
        assert_eq!((some.known_offset_sum(), some.unskipped()), (None, None));
        let of = |sums: &SampleSums, interval| {
            guaranteed_bytes(&[Part::new(interval, sums)], Criterion::Bytes, 0.95).map(|ends| (ends.low, ends.high))
        };
        assert_eq!((of(&all, 1), of(&some, 1_000)), (Ok((6_528.0, 6_528.0)), Err(NO_OFFSETS)));
    }

    /// Sums of samples with these sizes and numbers of trials.
    fn by_trials(interval: u64, samples: &[(u64, u64)]) -> SampleSums {
        let mut sums = SampleSums::default();
        samples.iter().for_each(|&(size, trials)| sums.record(size, trials, 0, interval));
        sums
    }

    #[test]
    fn sampled_by_allocations_counts_have_an_interval_and_bytes_need_one_size() {
        let criterion = Criterion::Allocations;
        let of = |samples: &[(u64, u64)]| {
            let sums = by_trials(1_000, samples);
            let parts = [Part::new(1_000, &sums)];
            (bytes(&parts, criterion, 0.95), objects(&parts, criterion, 0.95))
        };
        let (size, count) = of(&[(48, 1), (48, 1), (48, 1)]);
        assert!((count.estimate - 3_000.0).abs() < 1e-9 && (size.estimate - 144_000.0).abs() < 1e-6);
        assert!((ends(size).0 - 48.0 * ends(count).0).abs() < 1e-6);
        assert!((ends(size).1 - 48.0 * ends(count).1).abs() < 1e-6);
        assert!(ends(count).0 < 3_000.0 && ends(count).1 > 3_000.0);
        let (size, count) = of(&[(48, 1), (64, 1)]);
        assert_eq!((size.low, size.reason), (None, Some(MIXED_SIZES_NOT_BYTES)));
        assert!(ends(count).0 >= 2.0);
        let (size, count) = of(&[(48, 1)]);
        assert_eq!(size.reason, Some(SINGLE_SAMPLE));
        assert!(ends(count).0 >= 1.0);
        let (size, count) = of(&[]);
        assert_eq!((size.high, size.reason), (None, Some(UNSEEN_NOT_BOUNDED)));
        assert!((ends(count).1 - 3_688.879).abs() < 1e-3);
    }

    #[test]
    fn a_size_class_needs_one_interval_of_its_own() {
        use crate::size_classes::{CLASS_INTERVAL, class_trials};
        let of = |intervals: &[f64]| {
            let samples: Vec<(u64, u64)> = intervals.iter().map(|&interval| (48, class_trials(interval))).collect();
            let sums = by_trials(CLASS_INTERVAL, &samples);
            objects(&[Part::new(CLASS_INTERVAL, &sums)], Criterion::SizeClass, 0.95)
        };
        let found = of(&[100.0, 100.0, 100.0]);
        assert!((found.estimate / 300.0 - 1.0).abs() < 1e-6);
        // The same as sampling every allocation with 1/100.
        let plain = by_trials(100, &[(48, 1), (48, 1), (48, 1)]);
        let plain = objects(&[Part::new(100, &plain)], Criterion::Allocations, 0.95);
        assert!((ends(found).1 / ends(plain).1 - 1.0).abs() < 0.01, "{found:?} {plain:?}");
        assert_eq!(of(&[100.0, 10.0]).reason, Some(CLASS_INTERVAL_CHANGED));
        assert_eq!(of(&[]).reason, Some(UNSEEN_NOT_BOUNDED));
        let all = of(&[1.0, 1.0]);
        assert_eq!((all.estimate, ends(all)), (2.0, (2.0, 2.0)));
    }
}
