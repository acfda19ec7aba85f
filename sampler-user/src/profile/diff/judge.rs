//! One stack's change, its interval and its p-value.

use super::{Change, DiffOptions};
use crate::heap::sums::SampleSums;
use crate::profile::estimates::{NO_SAMPLES, Pool, TIME_WINDOWS};
use crate::profile::model::{Criterion, Profile};
use crate::profile::value::Value;
use crate::sampling::estimate::{Estimate, MIXED_SIZES, MIXED_SIZES_NOT_BYTES, Part};
use crate::sampling::growth::{Observed, p_from_intervals, p_no_growth};
use crate::sampling::interval::{self, Interval, Sampled};

/// Why a change between profiles of different criteria has no p-value.
const DIFFERENT_CRITERIA: &str = "the profiles were sampled by different criteria";

/// What is the same for all stacks of one profile.
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
        pool.sums(self.value).map(|(interval, sums)| Part { interval, sums }).collect()
    }
}

/// How a stack changed; the q-value comes later, when all are known.
pub(super) fn change(before: &Side, was: &Pool, after: &Side, is: &Pool, options: &DiffOptions) -> Change {
    let value = before.value;
    let (was_parts, is_parts) = (before.parts(was), after.parts(is));
    let scale = after.exposure / before.exposure;
    let unknown = |side: &Side| match side.profile {
        profile if !profile.samples_known => Some(NO_SAMPLES),
        profile if profile.time_windows => Some(TIME_WINDOWS),
        _ => None,
    };
    let figure = |side: &Side, pool: &Pool| match unknown(side) {
        None => pool.raw_estimate(side.profile, value, options.confidence),
        reason => Estimate { estimate: pool.total(value), reason, ..Estimate::default() },
    };
    let (was_figure, is_figure) = (figure(before, was), figure(after, is));
    let p_value = match unknown(before).or(unknown(after)) {
        None => p_value(before, &was_parts, after, &is_parts),
        Some(reason) => Err(reason),
    };
    Change {
        value: name(value),
        before: was_figure,
        after: is_figure,
        change: difference(was_figure, is_figure, scale),
        p_value: p_value.ok(),
        q_value: None,
        significant: false,
        reason: p_value.err(),
    }
}

/// The figure's name in `.json`.
fn name(value: Value) -> &'static str {
    match value {
        Value::AllocObjects => "alloc_objects",
        Value::AllocSpace => "alloc_bytes",
        Value::InuseObjects => "inuse_objects",
        Value::InuseSpace => "inuse_bytes",
        Value::AtExitObjects => "at_exit_objects",
        Value::AtExitSpace => "at_exit_bytes",
    }
}

fn difference(was: Estimate, is: Estimate, scale: f64) -> Estimate {
    let change = is.estimate - was.estimate * scale;
    let ends = |figure: Estimate, scale: f64| {
        Some((figure.estimate * scale, Interval { low: figure.low? * scale, high: figure.high? * scale }))
    };
    match (ends(was, scale), ends(is, 1.0)) {
        (Some(was), Some(is)) => {
            let (_, ends) = interval::difference(was, is);
            Estimate { estimate: change, low: Some(ends.low), high: Some(ends.high), ..Estimate::default() }
        }
        _ => Estimate { estimate: change, reason: was.reason.or(is.reason), ..Estimate::default() },
    }
}

fn p_value(before: &Side, was: &[Part<'_>], after: &Side, is: &[Part<'_>]) -> Result<f64, &'static str> {
    let value = before.value;
    let criterion = before.profile.criterion;
    if criterion != after.profile.criterion {
        return Err(DIFFERENT_CRITERIA);
    }
    match (criterion, value.is_bytes()) {
        (Criterion::Bytes, true) | (Criterion::Allocations, false) => {}
        // Numbers of allocations of one size grow as their bytes do, and the other way round.
        _ if one_size(was, is) && criterion != Criterion::SizeClass => {}
        (Criterion::Bytes, false) => return Err(MIXED_SIZES),
        _ => return Err(MIXED_SIZES_NOT_BYTES),
    }
    let observed = |part: &Part<'_>, exposure: f64| Observed {
        sampled: sampled(part.sums, criterion),
        interval: part.interval,
        exposure,
    };
    if let ([was], [is]) = (was, is) {
        return Ok(p_no_growth(&observed(was, before.exposure), &observed(is, after.exposure)));
    }
    if is.iter().all(|part| part.sums.samples == 0) {
        return Ok(1.0);
    }
    let rate = |side: &Side, parts: &[Part<'_>], confidence: f64| {
        let (total, ends) = interval::sum(parts.iter().map(|part| {
            let sampled = sampled(part.sums, criterion);
            (sampled.estimate, interval::from_sizes(sampled, part.interval, confidence))
        }));
        (total / side.exposure, Interval { low: ends.low / side.exposure, high: ends.high / side.exposure })
    };
    Ok(p_from_intervals(|confidence| {
        interval::difference(rate(before, was, confidence), rate(after, is, confidence)).1.low
    }))
}

/// The samples in trials.
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
