//! Merges profiles of several runs or hosts. Samples keep their sampling interval, so sums and variances add up.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::model::{ByAddress, Module, Profile, Row, SharedFrames, Stack, Unread};

/// Why profiles cannot be merged.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum MergeError {
    /// There is no profile.
    #[error("nothing to merge: no profile given")]
    Nothing,
    /// The profiles have different sampling criteria.
    #[error("profile {position} was sampled by `{other}` and the first by `{first}`: their samples cannot be added")]
    Criteria {
        /// Criterion of the first profile.
        first: &'static str,
        /// Criterion of the profile that differs.
        other: &'static str,
        /// Position of that profile, counted from 1.
        position: usize,
    },
    /// Only some of the recordings followed frees.
    #[error(
        "frees were tracked in {followed} of {all} profiles, so figures in use cannot be added: record all with --no-live, \
         or none"
    )]
    Live {
        /// Number of profiles with figures in use.
        followed: usize,
        /// Number of profiles.
        all: usize,
    },
}

/// Merges profiles. Processes stay separate even if their ids are equal; equal modules are stored once.
///
/// The duration is the sum of the durations, so that totals per second are means over the recordings.
///
/// # Errors
///
/// There is no profile, or their figures cannot be added.
pub fn merge(profiles: Vec<Profile>) -> Result<Profile, MergeError> {
    let all = profiles.len();
    let mut profiles = profiles.into_iter();
    let mut merged = profiles.next().ok_or(MergeError::Nothing)?;
    merged.keep_loss_intervals();
    let mut modules = Modules::of(&merged);
    let mut followed = usize::from(merged.header.live);
    for (index, profile) in profiles.enumerate() {
        if profile.header.criterion != merged.header.criterion {
            let (first, other) = (merged.header.criterion.name(), profile.header.criterion.name());
            return Err(MergeError::Criteria { first, other, position: index + 2 });
        }
        followed += usize::from(profile.header.live);
        add(&mut merged, profile, &mut modules);
    }
    if followed != 0 && followed != all {
        return Err(MergeError::Live { followed, all });
    }
    Ok(merged)
}

fn add(merged: &mut Profile, mut profile: Profile, modules: &mut Modules) {
    profile.keep_loss_intervals();
    let first_process = merged.processes.len();
    let module_of: Vec<usize> = profile.modules.into_iter().map(|module| modules.index(merged, module)).collect();
    let mut stacks: HashMap<ByAddress<Stack>, Arc<Stack>> = HashMap::new();
    let mut frames = SharedFrames::default();
    for row in &profile.rows {
        let stack = stacks.entry(ByAddress(Arc::clone(&row.key.stack)));
        let stack = stack.or_insert_with(|| moved(&row.key.stack, &module_of, &mut frames));
        let key = row.key.with(row.key.process + first_process, Arc::clone(stack));
        merged.rows.push(Row { key, ..row.clone() });
    }
    merged.processes.extend(profile.processes);
    merged.idle.extend(profile.idle);
    merged.header.started = merged.header.started.min(profile.header.started);
    merged.header.time = merged.header.time.max(profile.header.time);
    merged.header.unread = [merged.header.unread, profile.header.unread].into_iter().flatten().reduce(Unread::with);
    merged.header.duration = merged.header.duration.saturating_add(profile.header.duration);
    merged.header.growth_over = None;
    merged.header.recordings = merged.header.recordings.saturating_add(profile.header.recordings);
    let mut intervals: BTreeSet<u64> = merged.header.intervals().chain(profile.header.intervals()).collect();
    merged.header.interval = merged.header.interval.max(profile.header.interval);
    intervals.remove(&merged.header.interval);
    merged.header.earlier_intervals = intervals;
    merged.header.live &= profile.header.live;
    merged.header.ended_apart |= profile.header.ended_apart;
    merged.header.samples_known &= profile.header.samples_known;
    merged.header.offsets_known &= profile.header.offsets_known;
    merged.header.time_windows |= profile.header.time_windows;
    if !merged.header.host.split(", ").any(|host| host == profile.header.host) {
        merged.header.host = [merged.header.host.as_str(), &profile.header.host].join(", ");
    }
    if merged.header.unwind != profile.header.unwind {
        merged.header.unwind = "mixed".into();
    }
    for (name, count) in profile.counters {
        let sum = merged.counters.entry(name).or_default();
        *sum = sum.saturating_add(count);
    }
    for note in profile.notes {
        if !merged.notes.contains(&note) {
            merged.notes.push(note);
        }
    }
}

/// The stack with the new indices of its modules.
fn moved(stack: &Stack, module_of: &[usize], frames: &mut SharedFrames) -> Arc<Stack> {
    let index = |module: usize| module_of.get(module).copied();
    Arc::new(stack.with_frames(frames, |frame| frame.module = frame.module.and_then(index)))
}

/// Indices of the modules by path and build ID, regardless of where they were mapped.
struct Modules(HashMap<(Arc<str>, Option<Vec<u8>>), usize>);

impl Modules {
    fn of(profile: &Profile) -> Self {
        let key = |module: &Module| (Arc::clone(&module.path), module.build_id.clone());
        // The first of several equal modules represents all of them.
        Self(profile.modules.iter().enumerate().rev().map(|(index, module)| (key(module), index)).collect())
    }

    fn index(&mut self, merged: &mut Profile, module: Module) -> usize {
        *self.0.entry((Arc::clone(&module.path), module.build_id.clone())).or_insert_with(|| {
            merged.modules.push(module);
            merged.modules.len() - 1
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimates::{Pool, exact};
    use crate::model::{Criterion, LossBound};
    use crate::testing;
    use crate::value::Value;

    #[test]
    fn sums_and_variances_add() {
        let (one, mut two) = (testing::small(), testing::small());
        two.header.host = "elsewhere".into();
        two.processes[1].exact_alloc_bytes = Some(1);
        let merged = merge(vec![one.clone(), two]).expect("the same criterion");
        let (single, double) = (Pool::of(&one.rows), Pool::of(&merged.rows));
        for value in Value::COLUMNS {
            assert!((double.total(value) - 2.0 * single.total(value)).abs() < 1e-6);
            assert!((double.variance(value) / single.variance(value) - 2.0).abs() < 1e-12);
            assert_eq!(double.samples(value), 2 * single.samples(value));
        }
        assert_eq!((merged.processes.len(), merged.modules.len()), (2 * one.processes.len(), one.modules.len()));
        assert_eq!((merged.header.duration, merged.header.recordings), (one.header.duration * 2, 2));
        assert!(merged.header.host.ends_with(", elsewhere"));
        assert_eq!(exact(&merged, Some(2), Value::AllocSpace), exact(&one, Some(0), Value::AllocSpace));
    }

    /// What was allocated under an interval without a sample is covered by error bars, so no interval may get lost.
    #[test]
    fn all_intervals_that_were_in_force_are_kept() {
        let with = |intervals: &[u64]| {
            let mut profile = testing::small();
            profile.header.interval = intervals[0];
            intervals[1..].iter().for_each(|interval| profile.header.set_interval(*interval));
            profile
        };
        let merged =
            merge(vec![with(&[64, 4_096]), with(&[512, 128]), with(&[8_192, 64])]).expect("the same criterion");
        assert_eq!(merged.header.interval, 4_096);
        assert_eq!(Vec::from_iter(merged.header.earlier_intervals), [64, 128, 512, 8_192]);
        let same = merge(vec![testing::small(), testing::small()]).expect("the same criterion");
        assert!(same.header.earlier_intervals.is_empty());
    }

    #[test]
    fn what_was_held_at_exit_adds_and_the_latest_moment_counts() {
        let (one, mut two) = (testing::partly_read(), testing::partly_read());
        two.header.time += std::time::Duration::from_secs(60);
        let merged = merge(vec![one.clone(), two.clone(), testing::small()]).expect("the same criterion");
        let (held, all) = (Pool::of(&one.rows), Pool::of(&merged.rows));
        for value in [Value::AtExitSpace, Value::AtExitObjects] {
            assert!((all.total(value) / held.total(value) - 2.0).abs() < 1e-12);
            assert!((all.variance(value) / held.variance(value) - 2.0).abs() < 1e-12);
        }
        assert_eq!(
            (merged.header.time, merged.header.unread),
            (two.header.time, Some(Unread { records: 24, of: 2_000 }))
        );
        assert!(merged.header.ended_apart);
        let part = merged.only_process(3);
        assert!((Pool::of(&part.rows).total(Value::AtExitSpace) / held.total(Value::AtExitSpace) - 1.0).abs() < 1e-12);
        assert!(part.header.ended_apart && part.header.time == merged.header.time);
    }

    #[test]
    fn frames_keep_their_modules_and_rows_all_but_their_process() {
        let one = testing::small();
        let mut other = testing::small();
        other.modules.reverse();
        let last = other.modules.len() - 1;
        for row in &mut other.rows {
            let mut frames = SharedFrames::default();
            let reverse = |module| last - module;
            let stack = row.key.stack.with_frames(&mut frames, |frame| frame.module = frame.module.map(reverse));
            row.key.stack = Arc::new(stack);
        }
        let merged = merge(vec![one.clone(), other]).expect("the same criterion");
        for (a, b) in merged.rows.iter().zip(&merged.rows[one.rows.len()..]) {
            assert_eq!(a.key.stack, b.key.stack);
        }
        // Nothing but the process is another one.
        let rest = |row: &Row| (row.key.thread.clone(), row.key.function.clone(), row.key.interval);
        let rest = |rows: &[Row]| rows.iter().map(rest).collect::<Vec<_>>();
        assert_eq!(rest(&merged.rows), [rest(&one.rows), rest(&one.rows)].concat());
    }

    /// Losses stay with their process, under the sampling interval of their own recording.
    #[test]
    fn losses_stay_with_their_process() {
        let lossy = |interval, samples| {
            let mut profile = testing::small();
            profile.rows.retain(|row| row.key.interval == profile.header.interval);
            (profile.header.interval, profile.rows[0].key.interval) = (interval, interval);
            profile.rows.truncate(1);
            profile.processes[0].losses.alloc = LossBound { samples, sampled_bytes: 100 * samples };
            profile
        };
        let merged = merge(vec![lossy(64, 2), lossy(524_288, 3)]).expect("the same criterion");
        let losses =
            |index: usize| (merged.processes[index].losses.interval, merged.processes[index].losses.alloc.samples);
        assert_eq!((losses(0), losses(2)), ((64, 2), (524_288, 3)));
        assert!(merged.processes[1].losses.is_none());
        assert_eq!(merged.losses().alloc, LossBound { samples: 5, sampled_bytes: 500 });
        let above = |profile: &Profile, pool: &Pool| {
            let found = pool.estimate(profile, Value::AllocSpace, 0.95);
            found.high.expect("an interval") - found.estimate
        };
        let (whole, one) = (Pool::whole(&merged), lossy(524_288, 3));
        let (all, large) = (above(&merged, &whole), above(&one, &Pool::whole(&one)));
        assert!(large < all && all < 1.1 * large, "two samples at R = 64 add little: {large} {all}");
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut other = testing::small();
        other.header.criterion = Criterion::Allocations;
        let error = merge(vec![testing::small(), other]).expect_err("different criteria");
        assert!(error.to_string().contains("`allocations`") && error.to_string().contains("profile 2"));
        let mut other = testing::small();
        other.header.live = false;
        let error = merge(vec![testing::small(), other]).expect_err("frees in one only");
        assert_eq!(error, MergeError::Live { followed: 1, all: 2 });
        assert_eq!(merge(Vec::new()).expect_err("nothing"), MergeError::Nothing);
    }
}
