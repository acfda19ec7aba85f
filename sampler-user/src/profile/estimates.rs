//! Sums of rows put together, and the estimates that they give.

use super::model::{Profile, Row};
use super::value::Value;
use crate::heap::sums::SampleSums;
use crate::sampling::estimate::{self, Estimate, Part};

/// Why figures of a profile have no error bar that was read from a file without samples.
pub const NO_SAMPLES: &str = "read from a format that keeps no samples";

/// Sums of rows by sampling interval: what estimates of their total need.
#[derive(Clone, Debug, Default)]
pub struct Pool {
    parts: Vec<PoolPart>,
}

#[derive(Clone, Debug)]
struct PoolPart {
    interval: u64,
    alloc: SampleSums,
    inuse: SampleSums,
}

impl Pool {
    /// The pool of all these rows.
    pub fn of<'a>(rows: impl IntoIterator<Item = &'a Row>) -> Self {
        let mut pool = Self::default();
        rows.into_iter().for_each(|row| pool.add(row));
        pool
    }

    /// Adds a row.
    pub fn add(&mut self, row: &Row) {
        let part = match self.parts.iter_mut().find(|part| part.interval == row.interval) {
            Some(part) => part,
            None => {
                let (alloc, inuse) = Default::default();
                self.parts.push(PoolPart { interval: row.interval, alloc, inuse });
                let last = self.parts.len() - 1;
                &mut self.parts[last]
            }
        };
        part.alloc.add(&row.alloc);
        part.inuse.add(&row.inuse);
    }

    /// The estimate of a value over all rows, with its interval at `confidence` (0 to 1).
    pub fn estimate(&self, profile: &Profile, value: Value, confidence: f64) -> Estimate {
        if !profile.samples_known {
            return Estimate { estimate: self.total(value), reason: Some(NO_SAMPLES), ..Estimate::default() };
        }
        let parts: Vec<Part<'_>> = self.sums(value).map(|(interval, sums)| Part { interval, sums }).collect();
        of_parts(profile, &parts, value, confidence)
    }

    /// The point estimate alone.
    pub fn total(&self, value: Value) -> f64 {
        self.sums(value).map(|(_, sums)| value.estimate_of(sums)).sum::<f64>() + 0.0
    }

    /// The unbiased point estimate, without corrections.
    pub fn raw_total(&self, value: Value) -> f64 {
        self.sums(value).map(|(_, sums)| value.raw_estimate_of(sums)).sum::<f64>() + 0.0
    }

    /// Unbiased estimate of the unbiased point estimate's variance.
    pub fn variance(&self, value: Value) -> f64 {
        let variance = |sums: &SampleSums| if value.is_bytes() { sums.bytes_variance } else { sums.objects_variance };
        self.sums(value).map(|(_, sums)| variance(sums)).sum()
    }

    /// Samples behind a value.
    pub fn samples(&self, value: Value) -> u64 {
        self.sums(value).map(|(_, sums)| sums.samples).sum()
    }

    /// Bytes of the samples behind a value, as they are: there were at least so many.
    pub fn sampled_bytes(&self, value: Value) -> u64 {
        self.sums(value).map(|(_, sums)| sums.sampled_bytes).sum()
    }

    /// The sums behind a value, one for each sampling interval.
    pub fn sums(&self, value: Value) -> impl Iterator<Item = (u64, &SampleSums)> {
        self.parts.iter().map(move |part| (part.interval, if value.is_inuse() { &part.inuse } else { &part.alloc }))
    }
}

/// The estimate of one row's value.
pub fn of_row(profile: &Profile, row: &Row, value: Value, confidence: f64) -> Estimate {
    if !profile.samples_known {
        return Estimate { estimate: value.of(row), reason: Some(NO_SAMPLES), ..Estimate::default() };
    }
    of_parts(profile, &[Part { interval: row.interval, sums: value.sums(row) }], value, confidence)
}

fn of_parts(profile: &Profile, parts: &[Part<'_>], value: Value, confidence: f64) -> Estimate {
    let raw = if value.is_bytes() {
        estimate::bytes(parts, profile.criterion, confidence)
    } else {
        estimate::objects(parts, profile.criterion, confidence)
    };
    let corrections = parts.iter().map(|part| value.estimate_of(part.sums) - value.raw_estimate_of(part.sums));
    Estimate { estimate: raw.estimate + corrections.sum::<f64>(), ..raw }
}

/// What was counted of a value: over one process, or over all of them. `None` if any part of it was not counted.
pub fn exact(profile: &Profile, process: Option<usize>, value: Value) -> Option<u64> {
    let processes = match process {
        Some(index) => profile.processes.get(index..=index)?,
        None => &profile.processes[..],
    };
    let of = |process: &super::model::Process| match value {
        Value::AllocSpace => process.exact_alloc_bytes,
        Value::AllocObjects => process.exact_alloc_objects,
        Value::InuseSpace | Value::InuseObjects => None,
    };
    if processes.is_empty() {
        return None;
    }
    processes.iter().try_fold(0u64, |sum, process| sum.checked_add(of(process)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::testing;

    #[test]
    fn pools_keep_intervals_apart_and_add_up() {
        let profile = testing::small();
        let pool = Pool::of(&profile.rows);
        for value in Value::ALL {
            let expected: f64 = profile.rows.iter().map(|row| value.of(row)).sum();
            assert!((pool.total(value) - expected).abs() < 1e-6 * expected);
            assert_eq!(pool.estimate(&profile, value, 0.95).estimate, pool.total(value));
        }
        assert_eq!(pool.parts.len(), 2);
        assert_eq!(pool.samples(Value::AllocSpace), 60);
    }

    #[test]
    fn without_samples_there_is_no_error_bar() {
        let mut profile = testing::small();
        profile.samples_known = false;
        let estimate = Pool::of(&profile.rows).estimate(&profile, Value::AllocSpace, 0.95);
        assert_eq!((estimate.low, estimate.reason), (None, Some(NO_SAMPLES)));
    }

    #[test]
    fn exact_totals_need_every_process() {
        let mut profile = testing::small();
        assert_eq!(exact(&profile, Some(0), Value::AllocSpace), Some(60_000_000));
        assert_eq!(exact(&profile, None, Value::AllocSpace), None);
        assert_eq!(exact(&profile, Some(9), Value::AllocSpace), None);
        assert_eq!(exact(&profile, Some(0), Value::InuseSpace), None);
        profile.processes[1].exact_alloc_bytes = Some(5);
        assert_eq!(exact(&profile, None, Value::AllocSpace), Some(60_000_005));
    }
}
