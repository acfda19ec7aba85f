//! Bounds on the effect of lost events on an estimate. The interval is widened by samples that may be missing from the
//! sums and by samples in the sums that may have been freed. `docs/sampling.md` derives the formulas.

use super::model::{Criterion, LossBound, Losses, Process, Profile};
use super::value::Value;
use heapbpf_statistics::estimate::{Estimate, Part};
use heapbpf_statistics::interval::{Interval, Sampled, from_sizes};
use heapbpf_statistics::sums::SampleSums;

/// Reason for figures in use if records were not read in time.
pub const UNREAD: &str = "some records were not read in time and are missing: a larger -i makes fewer";
/// Reason: the number of lost events is unknown.
pub const UNBOUNDED: &str = "lost records were not counted; use a larger -i";
/// Reason for figures at the peak: events were lost before the peak.
pub const PEAK_UNKNOWN: &str = "records were lost before the peak; use a larger -i";

/// Reason: the weights that a process reports for its samples cannot come from sampling by bytes with one interval.
pub const WEIGHTS_UNPROVEN: &str = "the process reports its own sample weights, and they do not come from one sampling \
                                    interval: their variance is not known";

/// Reason for figures of allocation: for some time, a process's allocations were not observed.
pub const UNSEEN: &str = "another recording counted it for a while, and those allocations are missing";

/// Maximum number of sampling intervals with bounds of their own, because a file may claim a different one for each
/// process.
const MOST_INTERVALS: usize = 32;

/// A bound, and the largest R under which the samples may have been drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
struct AtInterval {
    interval: u64,
    bound: LossBound,
}

/// Samples that may be missing from a figure, and samples in it that may be stale.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LossBounds {
    missing: Vec<AtInterval>,
    stale: Vec<AtInterval>,
}

/// Bounds on lost samples, or the reason why there are none.
pub type Lost = Result<LossBounds, &'static str>;

/// Bounds on lost samples for each kind of figure.
#[derive(Clone, Debug)]
pub struct LostOf {
    alloc: Lost,
    inuse: Lost,
    at_exit: Lost,
}

impl LostOf {
    /// Sums over processes; see [`LossBounds::of`].
    pub fn new(profile: &Profile, processes: impl Iterator<Item = usize> + Clone, largest: u64) -> Self {
        let of = |value| LossBounds::of(profile, processes.clone(), value, largest);
        Self { alloc: of(Value::AllocSpace), inuse: of(Value::InuseSpace), at_exit: of(Value::AtExitSpace) }
    }

    /// The bounds of two sets of processes together.
    #[must_use]
    pub fn with(self, others: &Self) -> Self {
        let both = |these: Lost, others: &Lost| Ok(these?.with(others.as_ref().map_err(|reason| *reason)?));
        Self {
            alloc: both(self.alloc, &others.alloc),
            inuse: both(self.inuse, &others.inuse),
            at_exit: both(self.at_exit, &others.at_exit),
        }
    }

    /// The bounds for a value.
    pub const fn of(&self, value: Value) -> &Lost {
        match value {
            Value::AllocSpace | Value::AllocObjects => &self.alloc,
            Value::InuseSpace | Value::InuseObjects | Value::ResidentSpace | Value::SwappedSpace => &self.inuse,
            Value::AtExitSpace | Value::AtExitObjects => &self.at_exit,
        }
    }
}

/// The kind of a figure.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// The sampling criterion.
    pub criterion: Criterion,
    /// Whether the figure counts bytes; otherwise allocations.
    pub is_bytes: bool,
}

impl Kind {
    /// The kind of a value of a profile.
    pub fn of(profile: &Profile, value: Value) -> Self {
        Self { criterion: profile.header.criterion, is_bytes: value.is_bytes() }
    }
}

impl LossBounds {
    /// The bounds, added up over processes (given by index, without repetitions). `largest` is the largest sampling
    /// interval of the figure's own samples, in trials.
    ///
    /// # Errors
    ///
    /// The reason why no bound can be given.
    pub fn of(profile: &Profile, processes: impl IntoIterator<Item = usize>, value: Value, largest: u64) -> Lost {
        if profile.header.unread.is_some() {
            return Err(UNREAD);
        }
        let mut bounds = Self::default();
        for index in processes {
            // Figures in use cover only blocks whose frees were observed; they state since when.
            if !value.needs_frees() && profile.processes.get(index).is_some_and(Process::was_unseen) {
                return Err(UNSEEN);
            }
            let Some(process) = profile.processes.get(index).filter(|process| !process.losses.is_none()) else {
                continue;
            };
            if value.needs_frees() && !profile.knows_inuse(index)
                || value.is_at_exit() && !profile.may_hold_at_exit(index)
                // Memory that the process held at exit is not part of what is in use.
                || value.is_inuse() && profile.header.ended_apart && process.ended
            {
                continue;
            }
            let losses = &process.losses;
            if losses.weights_unproven {
                return Err(WEIGHTS_UNPROVEN);
            }
            if losses.unbounded {
                return Err(UNBOUNDED);
            }
            let interval =
                if losses.interval > 0 { losses.interval } else { largest.max(profile.header.interval).max(1) };
            if value.needs_frees() {
                if value.is_inuse() && losses.inuse_unbounded {
                    return Err(PEAK_UNKNOWN);
                }
                bounds.add_missing(interval, &losses.inuse_missing);
                add(&mut bounds.stale, interval, &losses.inuse_stale);
            } else {
                bounds.add_missing(interval, &losses.alloc);
            }
        }
        Ok(bounds)
    }

    /// The bounds of two sets of processes together.
    #[must_use]
    pub fn with(mut self, others: &Self) -> Self {
        others.missing.iter().for_each(|at| add(&mut self.missing, at.interval, &at.bound));
        others.stale.iter().for_each(|at| add(&mut self.stale, at.interval, &at.bound));
        self
    }

    /// Adds samples that may be missing, drawn under R = `interval`.
    pub fn add_missing(&mut self, interval: u64, bound: &LossBound) {
        add(&mut self.missing, interval, bound);
    }

    /// Whether lost events cannot have affected the figure.
    pub fn is_none(&self) -> bool {
        self.missing.is_empty() && self.stale.is_empty()
    }

    /// Widens the interval of an estimate to allow for lost samples. `of` estimates from parts; `parts` are the
    /// recorded samples. If `of` returns no interval, the result has none.
    pub fn widen(
        &self,
        parts: &[Part<'_>],
        kind: Kind,
        confidence: f64,
        of: impl Fn(&[Part<'_>]) -> Estimate,
    ) -> Estimate {
        let seen_only = of(parts);
        if self.is_none() {
            return seen_only;
        }
        let nothing = SampleSums::default();
        let parts = self.parts(parts, &nothing);
        let (seen, with_lost) = (of(&parts), of(&self.with_lost(&parts)));
        let (Some(low), Some(high)) = (seen.low, with_lost.high) else {
            let reason = seen.reason.or(with_lost.reason);
            return Estimate { low: None, high: None, reason, ..seen_only };
        };
        let above = (high - seen.estimate).hypot(self.own_distance(kind, confidence));
        Estimate {
            low: Some(self.low(&parts, kind, low)),
            high: Some(seen.estimate + above + weight(&self.missing, kind)),
            reason: None,
            ..seen_only
        }
    }

    /// Widens the interval of bytes that was computed from offsets.
    ///
    /// # Errors
    ///
    /// The errors of `of`.
    pub fn widen_guaranteed(
        &self,
        parts: &[Part<'_>],
        of: impl Fn(&[Part<'_>]) -> Result<Interval, &'static str>,
    ) -> Result<Interval, &'static str> {
        if self.is_none() {
            return of(parts);
        }
        let nothing = SampleSums::default();
        let parts = self.parts(parts, &nothing);
        let (seen, with_lost) = (of(&parts)?, of(&self.with_lost(&parts))?);
        let kind = Kind { criterion: Criterion::Bytes, is_bytes: true };
        // A lost sample adds one to the number of samples, and at most its size to the bytes that were not skipped.
        let sizes: f64 = self.missing.iter().map(|lost| lost.bound.sampled_bytes as f64).sum();
        Ok(Interval { low: self.low(&parts, kind, seen.low), high: with_lost.high + sizes })
    }

    /// Samples in trials for the growth test, plus all samples that may be missing.
    pub fn most(&self, seen: Sampled, kind: Kind) -> Sampled {
        let lost = total(&self.missing);
        let sum = if kind.is_bytes { lost.sampled_bytes } else { lost.samples };
        Sampled {
            samples: seen.samples.saturating_add(lost.samples),
            sum: seen.sum + sum as f64,
            estimate: seen.estimate + weight(&self.missing, kind),
        }
    }

    /// Samples in trials for the growth test, minus all samples that may be stale. `r` is the sampling interval in
    /// trials.
    pub fn least(&self, seen: Sampled, r: u64, kind: Kind) -> Sampled {
        if self.stale.is_empty() {
            return seen;
        }
        let stale = total(&self.stale);
        let gone = if kind.is_bytes { stale.sampled_bytes } else { stale.samples } as f64;
        let samples = seen.samples.saturating_sub(stale.samples);
        let sum = (seen.sum - gone).max(0.0);
        // In addition to its R, a stale sample of n trials removes n/P − R ≤ n − 1 from the estimate, which is 0 for
        // n = 1.
        let beyond = seen.estimate - seen.samples as f64 * r as f64 - if kind.is_bytes { gone } else { 0.0 };
        let estimate = if r == 1 { sum } else { beyond + samples as f64 * r as f64 };
        Sampled { samples, sum, estimate }
    }

    /// The largest R under which samples may have been lost; 0 if there are none.
    pub fn largest_interval(&self) -> u64 {
        self.missing.iter().chain(&self.stale).map(|at| at.interval).max().unwrap_or(0)
    }

    /// The parts, plus one for each R under which samples may have been lost.
    fn parts<'a>(&self, parts: &[Part<'a>], nothing: &'a SampleSums) -> Vec<Part<'a>> {
        let mut all = parts.to_vec();
        for &AtInterval { interval, .. } in &self.missing {
            if all.iter().all(|part| part.interval != interval) {
                all.push(Part::new(interval, nothing));
            }
        }
        all
    }

    /// The parts, each with all samples that may have been lost under its R, because the R of a lost sample is unknown.
    fn with_lost<'a>(&self, parts: &[Part<'a>]) -> Vec<Part<'a>> {
        let lost = |r: u64| {
            let at = self.missing.iter().filter(|lost| lost.interval >= r);
            at.fold(0u64, |sum, lost| sum.saturating_add(lost.bound.samples))
        };
        parts.iter().map(|part| Part { lost: lost(part.interval), ..*part }).collect()
    }

    /// The lower end without samples that may be stale, but at least the unweighted samples that remain.
    fn low(&self, parts: &[Part<'_>], kind: Kind, seen: f64) -> f64 {
        if self.stale.is_empty() {
            return seen;
        }
        let stale = total(&self.stale);
        let (count, gone): (fn(&SampleSums) -> u64, u64) = if kind.is_bytes {
            (|sums| sums.sampled_bytes, stale.sampled_bytes)
        } else {
            (|sums| sums.samples, stale.samples)
        };
        let there = parts.iter().fold(0u64, |sum, part| sum.saturating_add(count(part.sums)));
        (seen - weight(&self.stale, kind)).max(there.saturating_sub(gone) as f64)
    }

    /// How far above their weight lost samples may reach if the parts do not account for it, because a lost sample may
    /// differ in size from the observed ones. Allocations are treated as if each took one trial, bytes as if the
    /// samples had any one size.
    fn own_distance(&self, kind: Kind, confidence: f64) -> f64 {
        let unseen = |samples, r| from_sizes(Sampled { samples, ..Sampled::default() }, r, confidence).high;
        let distance = |lost: &AtInterval| match (kind.criterion, kind.is_bytes) {
            (Criterion::Bytes, true) | (Criterion::Allocations, false) => 0.0,
            _ if lost.bound.samples == 0 => 0.0,
            (_, true) => lost.bound.sampled_bytes as f64 * unseen(1, lost.interval),
            (_, false) => unseen(lost.bound.samples, lost.interval),
        };
        self.missing.iter().map(|lost| distance(lost).powi(2)).sum::<f64>().sqrt()
    }
}

fn add(bounds: &mut Vec<AtInterval>, interval: u64, bound: &LossBound) {
    if bound.is_none() {
        return;
    }
    if let Some(known) = bounds.iter_mut().find(|known| known.interval == interval) {
        return known.bound.add(bound);
    }
    if bounds.len() < MOST_INTERVALS {
        return bounds.push(AtInterval { interval, bound: *bound });
    }
    // A larger R is also a valid bound.
    let larger = bounds.iter_mut().filter(|known| known.interval > interval).min_by_key(|known| known.interval);
    match larger {
        Some(larger) => larger.bound.add(bound),
        None => {
            if let Some(largest) = bounds.iter_mut().max_by_key(|known| known.interval) {
                largest.interval = interval;
                largest.bound.add(bound);
            }
        }
    }
}

fn total(bounds: &[AtInterval]) -> LossBound {
    let mut total = LossBound::default();
    bounds.iter().for_each(|at| total.add(&at.bound));
    total
}

/// Upper bound of what these samples represent: n/P ≤ n + R − 1 if trials are bytes, because the expected offset of a
/// sample is not negative; otherwise 1/P ≤ R.
fn weight(bounds: &[AtInterval], kind: Kind) -> f64 {
    let weight = |&AtInterval { interval, bound }: &AtInterval| {
        let (samples, bytes, r) = (bound.samples as f64, bound.sampled_bytes as f64, interval as f64);
        match (kind.is_bytes, kind.criterion) {
            (true, Criterion::Bytes) => bytes + samples * (r - 1.0),
            (true, _) => bytes * r,
            (false, _) => samples * r,
        }
    };
    bounds.iter().map(weight).sum()
}

impl Profile {
    /// Stores with each process's losses the largest sampling interval that was in force, if none is stored yet. After
    /// profiles are merged, it could no longer be determined.
    pub fn keep_loss_intervals(&mut self) {
        let is_open = |process: &Process| !process.losses.is_none() && process.losses.interval == 0;
        if !self.processes.iter().any(is_open) {
            return;
        }
        let largest = self
            .rows
            .iter()
            .filter(|row| !row.is_of_go_runtime())
            .map(|row| row.key.interval)
            .chain(self.header.intervals())
            .fold(0, u64::max);
        let open = self.processes.iter_mut().filter(|process| is_open(process));
        open.for_each(|process| process.losses.interval = largest);
    }

    /// The losses of all processes.
    pub fn losses(&self) -> Losses {
        let mut all = Losses::default();
        self.processes.iter().for_each(|process| all.add(&process.losses));
        all
    }
}

#[cfg(test)]
#[path = "loss_bounds_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "loss_coverage_tests.rs"]
mod coverage_tests;
