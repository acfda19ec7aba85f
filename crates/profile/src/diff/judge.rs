//! The change of one stack, with its interval and p-value; and the verdict on all of them: which are significant.

use super::{Change, DiffOptions, Direction, Verdict};
use crate::estimates::{NO_SAMPLES, Pool, TIME_WINDOWS};
use crate::loss_bounds::{Kind, LossBounds};
use crate::model::{Criterion, LossBound, Profile};
use crate::value::Value;
use heapbpf_statistics::estimate::{Estimate, MIXED_SIZES, MIXED_SIZES_NOT_BYTES, Part};
use heapbpf_statistics::growth::{Observed, p_from_intervals, p_no_growth, q_values};
use heapbpf_statistics::interval::{self, Interval, Sampled};
use heapbpf_statistics::sums::SampleSums;

/// The false discovery rate: the largest expected share of false positives among stacks reported as significant.
pub(super) const FALSE_DISCOVERY_RATE: f64 = 0.05;
/// [`Verdict::Maybe`] allows this multiple of the false discovery rate.
const MAYBE: f64 = 5.0;
/// Reason why a change between profiles with different criteria has no p-value.
const DIFFERENT_CRITERIA: &str = "the profiles were sampled by different criteria";

/// One of the two profiles, with what all its stacks share.
pub(super) struct Side<'a> {
    profile: &'a Profile,
    value: Value,
    exposure: f64,
}

impl<'a> Side<'a> {
    pub(super) fn new(profile: &'a Profile, value: Value, exposure: f64) -> Self {
        Self { profile, value, exposure }
    }

    fn parts<'p>(&self, pool: &'p Pool) -> Vec<Part<'p>> {
        pool.sums(self.value).map(|(interval, sums)| Part::new(interval, sums)).collect()
    }
}

/// The change of a stack. The q-value is filled in later, when all p-values are known.
pub(super) fn change(before: &Side, was: &Pool, after: &Side, is: &Pool, options: &DiffOptions) -> Change {
    let value = before.value;
    let (was_parts, is_parts) = (before.parts(was), after.parts(is));
    let scale = after.exposure / before.exposure;
    let unknown = |side: &Side| match side.profile {
        profile if !profile.header.samples_known => Some(NO_SAMPLES),
        profile if profile.header.time_windows => Some(TIME_WINDOWS),
        _ => None,
    };
    let figure = |side: &Side, pool: &Pool| match unknown(side) {
        None => pool.raw_estimate(side.profile, value, options.confidence, &LossBound::default()),
        reason => Estimate { estimate: pool.total(value), reason, ..Estimate::default() },
    };
    let (was_figure, is_figure) = (figure(before, was), figure(after, is));
    let (lost_before, lost_after) = (was.losses(before.profile, value), is.losses(after.profile, value));
    // One-sided p-values of growth and of shrinkage. Losses count against both.
    let p_values = match (unknown(before).or(unknown(after)), &*lost_before, &*lost_after) {
        (None, Ok(lost_before), Ok(lost_after)) => {
            let (was, is) = ((&*was_parts, lost_before), (&*is_parts, lost_after));
            p_value(before, was, after, is).and_then(|grew| Ok((grew, p_value(after, is, before, was)?)))
        }
        (Some(reason), ..) => Err(reason),
        (_, Err(reason), _) | (.., Err(reason)) => Err(*reason),
    };
    let p_value = p_values.map(|(grew, _)| grew);
    let p_two_sided = p_values.map(|(grew, shrank)| (2.0 * grew.min(shrank)).min(1.0));
    let touched = was.is_touched(before.profile, value) || is.is_touched(after.profile, value);
    let change = difference(was_figure, is_figure, scale, touched);
    Change {
        value: value.json_name(),
        before: was_figure,
        after: is_figure,
        change,
        p_value: p_value.ok(),
        q_value: None,
        significant: false,
        direction: direction(was_figure.estimate, is_figure.estimate, change.estimate),
        p_two_sided: p_two_sided.ok(),
        verdict: None,
        reason: p_value.err(),
    }
}

/// Computes the q-values for the changes that have a p-value, in a family of at least `tests` tests.
pub(super) fn correct<'a>(family: impl Iterator<Item = &'a mut Change>, tests: usize) {
    let judged: Vec<&mut Change> = family.filter(|change| change.p_value.is_some()).collect();
    let corrected = |p: fn(&Change) -> Option<f64>| {
        let mut p_values: Vec<f64> = judged.iter().filter_map(|change| p(change)).collect();
        p_values.resize(tests.max(judged.len()), 1.0);
        q_values(&p_values)
    };
    let (growth, either) = (corrected(|change| change.p_value), corrected(|change| change.p_two_sided));
    for (change, (q, q_either)) in judged.into_iter().zip(growth.into_iter().zip(either)) {
        change.q_value = Some(q);
        change.significant = q <= FALSE_DISCOVERY_RATE;
        change.verdict = Some(match q_either {
            q if q <= FALSE_DISCOVERY_RATE => Verdict::Sure,
            q if q <= MAYBE * FALSE_DISCOVERY_RATE => Verdict::Maybe,
            _ => Verdict::Chance,
        });
    }
}

/// Direction of the change, from the figures that are shown: a profile may have no numbers of samples. Less than half a
/// byte or block is shown as zero, and is no change: pprof has whole numbers only.
fn direction(was: f64, is: f64, change: f64) -> Direction {
    const LEAST: f64 = 0.5;
    if was >= LEAST && is.abs() < LEAST {
        Direction::Gone
    } else if was.abs() < LEAST && is >= LEAST {
        Direction::New
    } else if change >= LEAST {
        Direction::Grew
    } else if change <= -LEAST {
        Direction::Shrank
    } else {
        Direction::Same
    }
}

/// Interval of the change. If events were lost (`touched`), the error from them is systematic and does not average out,
/// so opposite ends are subtracted.
fn difference(was: Estimate, is: Estimate, scale: f64, touched: bool) -> Estimate {
    let change = is.estimate - was.estimate * scale;
    let ends = |figure: Estimate, scale: f64| {
        Some((figure.estimate * scale, Interval { low: figure.low? * scale, high: figure.high? * scale }))
    };
    match (ends(was, scale), ends(is, 1.0)) {
        (Some(was), Some(is)) => {
            let ends = if touched { apart(was.1, is.1) } else { interval::difference(was, is).1 };
            Estimate { estimate: change, low: Some(ends.low), high: Some(ends.high), ..Estimate::default() }
        }
        _ => Estimate { estimate: change, reason: was.reason.or(is.reason), ..Estimate::default() },
    }
}

/// The smallest and the largest difference between values in the two intervals.
fn apart(was: Interval, is: Interval) -> Interval {
    Interval { low: is.low - was.high, high: is.high - was.low }
}

/// Samples of one figure, and bounds on how many may have been lost.
type BoundedSamples<'a> = (&'a [Part<'a>], &'a LossBounds);

/// Allows for losses in the way that makes growth least likely: adds all samples that may have been lost before, and
/// removes all samples that may be stale after.
fn p_value(
    before: &Side,
    (was, lost_before): BoundedSamples<'_>,
    after: &Side,
    (is, lost_after): BoundedSamples<'_>,
) -> Result<f64, &'static str> {
    let value = before.value;
    let criterion = before.profile.header.criterion;
    if criterion != after.profile.header.criterion {
        return Err(DIFFERENT_CRITERIA);
    }
    match (criterion, value.is_bytes()) {
        (Criterion::Bytes, true) | (Criterion::Allocations, false) => {}
        // The number of allocations of one size grows exactly as their bytes do.
        _ if one_size(was, is) && criterion != Criterion::SizeClass => {}
        (Criterion::Bytes, false) => return Err(MIXED_SIZES),
        _ => return Err(MIXED_SIZES_NOT_BYTES),
    }
    // The test takes samples in trials, which are bytes or allocations.
    let kind = Kind { criterion, is_bytes: criterion == Criterion::Bytes };
    if let ([was], [is]) = (was, is)
        && lost_before.largest_interval() <= was.interval
        && lost_after.largest_interval() <= is.interval
    {
        let (most, least) = (sampled(was.sums, criterion), sampled(is.sums, criterion));
        let (most, least) = (lost_before.most(most, kind), lost_after.least(least, is.interval, kind));
        let observed = |sampled, part: &Part<'_>, exposure| Observed { sampled, interval: part.interval, exposure };
        return Ok(p_no_growth(&observed(most, was, before.exposure), &observed(least, is, after.exposure)));
    }
    if is.iter().all(|part| part.sums.samples == 0) {
        return Ok(1.0);
    }
    let trials = |parts: &[Part<'_>], confidence: f64| {
        let (estimate, ends) = interval::sum(parts.iter().map(|part| {
            let seen = sampled(part.sums, criterion);
            let sampled = Sampled { samples: seen.samples.saturating_add(part.lost), ..seen };
            (seen.estimate, interval::from_sizes(sampled, part.interval, confidence))
        }));
        Estimate { estimate, low: Some(ends.low), high: Some(ends.high), ..Estimate::default() }
    };
    let rate = |side: &Side, (parts, lost): BoundedSamples<'_>, confidence: f64| {
        let found = lost.widen(parts, kind, confidence, |parts| trials(parts, confidence));
        let per = |end: Option<f64>| end.unwrap_or(found.estimate) / side.exposure;
        (found.estimate / side.exposure, Interval { low: per(found.low), high: per(found.high) })
    };
    let touched = !lost_before.is_none() || !lost_after.is_none();
    Ok(p_from_intervals(|confidence| {
        let (was, is) = (rate(before, (was, lost_before), confidence), rate(after, (is, lost_after), confidence));
        if touched { apart(was.1, is.1).low } else { interval::difference(was, is).1.low }
    }))
}

/// The samples, in trials.
fn sampled(sums: &SampleSums, criterion: Criterion) -> Sampled {
    if criterion == Criterion::Bytes {
        return Sampled { samples: sums.sized_samples(), sum: sums.sampled_bytes as f64, estimate: sums.bytes };
    }
    Sampled { samples: sums.samples, sum: sums.samples as f64, estimate: sums.objects }
}

/// Whether all samples of both profiles have one size, above zero.
fn one_size(was: &[Part<'_>], is: &[Part<'_>]) -> bool {
    let mut all = SampleSums::default();
    was.iter().chain(is).for_each(|part| all.add(part.sums));
    all.samples > 0 && all.smallest_bytes == all.largest_bytes && all.smallest_bytes > 0
}
