//! Tests of the bounds against calculations by hand.

use super::*;
use crate::estimates::{Pool, of_row};
use crate::model::Unread;
use crate::testing;
use heapbpf_statistics::interval::from_offsets;

fn bound(samples: u64, sampled_bytes: u64) -> LossBound {
    LossBound { samples, sampled_bytes }
}

/// A profile of one process with one row that has these samples.
fn profile(interval: u64, alloc: SampleSums, inuse: SampleSums, losses: Losses) -> Profile {
    let mut profile = testing::small();
    profile.header.interval = interval;
    profile.processes.truncate(1);
    profile.processes[0].losses = losses;
    profile.rows.truncate(1);
    profile.rows[0].key.interval = interval;
    (profile.rows[0].alloc, profile.rows[0].inuse) = (alloc, inuse);
    profile
}

fn ends(profile: &Profile, value: Value) -> (f64, f64) {
    let found = of_row(profile, &profile.rows[0], value, 0.95);
    assert_eq!(found.estimate, value.of(&profile.rows[0]), "losses move no estimate");
    let pooled = Pool::whole(profile).estimate(profile, value, 0.95);
    assert_eq!((pooled.low, pooled.high), (found.low, found.high), "one row is its process");
    (found.low.expect("an interval"), found.high.expect("an interval"))
}

#[test]
fn with_every_allocation_sampled_the_bounds_are_what_was_lost() {
    let losses =
        Losses { alloc: bound(2, 30), inuse_missing: bound(1, 10), inuse_stale: bound(3, 250), ..Losses::default() };
    let profile = profile(1, testing::sums(5, 100, 1), testing::sums(4, 100, 1), losses);
    assert_eq!(ends(&profile, Value::AllocSpace), (500.0, 530.0));
    assert_eq!(ends(&profile, Value::AllocObjects), (5.0, 7.0));
    assert_eq!(ends(&profile, Value::InuseSpace), (150.0, 410.0));
    assert_eq!(ends(&profile, Value::InuseObjects), (1.0, 5.0));
    let guaranteed = Pool::of([&profile.rows[0]]).guaranteed(&profile, Value::InuseSpace, 0.95);
    assert_eq!(guaranteed, Ok(Interval { low: 150.0, high: 410.0 }));
    let mut all_stale = profile;
    all_stale.processes[0].losses.inuse_stale = bound(9, 9_000);
    assert_eq!(ends(&all_stale, Value::InuseSpace), (0.0, 410.0));
}

/// The upper end is that of all samples including the lost ones, each of which has a weight of at most its size plus
/// R − 1.
#[test]
fn of_samples_the_upper_end_is_that_of_all_of_them() {
    const R: u64 = 4_096;
    let losses = Losses { alloc: bound(3, 900), inuse_stale: bound(2, 600), ..Losses::default() };
    let seen = testing::sums(20, 300, R);
    let profile = profile(R, seen, seen, losses);
    let sampled = Sampled { samples: 20, sum: 6_000.0, estimate: seen.bytes };
    let alone = from_sizes(sampled, R, 0.95);
    let all = Sampled { samples: 23, sum: 6_900.0, estimate: seen.bytes + 900.0 + 3.0 * 4_095.0 };
    let (low, high) = ends(&profile, Value::AllocSpace);
    assert!((low - alone.low).abs() < 1e-6 && (high / from_sizes(all, R, 0.95).high - 1.0).abs() < 1e-12);
    let (low, high) = ends(&profile, Value::InuseSpace);
    assert!((low - (alone.low - 600.0 - 2.0 * 4_095.0)).abs() < 1e-6 && (high - alone.high).abs() < 1e-6);
    // In the interval from offsets, lost samples count like recorded ones.
    let found = Pool::of([&profile.rows[0]]).guaranteed(&profile, Value::AllocSpace, 0.95).expect("bytes");
    let unskipped = seen.unskipped().expect("offsets") as f64;
    let all = from_offsets(23, unskipped + 900.0, 6_900.0, R, 0.95);
    assert!((found.high / all.high - 1.0).abs() < 1e-12);
    // For a count with one size, a lost sample may have a single byte and represent R allocations.
    let (_, high) = ends(&profile, Value::AllocObjects);
    assert!(high > seen.objects + 3.0 * 4_096.0, "{high}");
}

#[test]
fn other_criteria_weigh_a_sample_with_its_interval() {
    let mut sums = SampleSums::default();
    (0..5).for_each(|_| sums.record(64, 1, 0, 50));
    let mut profile = profile(50, sums, sums, Losses { alloc: bound(2, 128), ..Losses::default() });
    profile.header.criterion = Criterion::Allocations;
    let seen = Sampled { samples: 7, sum: 7.0, estimate: 7.0 * 50.0 };
    let (_, high) = ends(&profile, Value::AllocObjects);
    assert!((high - from_sizes(seen, 50, 0.95).high).abs() < 1e-9);
    let (_, high) = ends(&profile, Value::AllocSpace);
    assert!(high > (sums.bytes + 128.0 * 50.0), "{high}");
    // Losses do not give an interval to a figure that has none.
    profile.rows[0].alloc.record(65, 1, 0, 50);
    assert!(of_row(&profile, &profile.rows[0], Value::AllocSpace, 0.95).low.is_none());
}

/// The R of lost samples is unknown, so the largest of several is allowed for, even if no row has it.
#[test]
fn several_intervals() {
    let mut profile = testing::small();
    let before = Pool::whole(&profile).estimate(&profile, Value::AllocSpace, 0.95);
    profile.processes[1].losses.alloc = bound(4, 400);
    profile.keep_loss_intervals();
    assert_eq!((profile.processes[0].losses.interval, profile.processes[1].losses.interval), (0, 1_048_576));
    let after = Pool::whole(&profile).estimate(&profile, Value::AllocSpace, 0.95);
    assert_eq!((after.estimate, after.low.map(f64::round)), (before.estimate, before.low.map(f64::round)));
    assert!(after.high.expect("an interval") > before.high.expect("an interval") + 400.0 + 4.0 * 1_048_575.0);
    // Process 0 has no losses, so its rows and its total do not change.
    let of_first = |profile: &Profile| Pool::of(&profile.rows[..4]).estimate(profile, Value::AllocSpace, 0.95);
    assert_eq!(of_first(&profile), of_first(&testing::small()));
    assert_eq!(
        of_row(&profile, &profile.rows[0], Value::AllocSpace, 0.95),
        of_row(&testing::small(), &profile.rows[0], Value::AllocSpace, 0.95)
    );
    // A process that lost all its rows is part of the total.
    profile.rows.retain(|row| row.key.process == 0);
    let without = Pool::of(&profile.rows).estimate(&profile, Value::AllocSpace, 0.95);
    let whole = Pool::whole(&profile).estimate(&profile, Value::AllocSpace, 0.95);
    assert!(whole.high > without.high);
    profile.rows.clear();
    let nothing = Pool::whole(&profile).estimate(&profile, Value::AllocSpace, 0.95);
    assert_eq!((nothing.estimate, nothing.low, nothing.reason), (0.0, Some(0.0), None));
    assert!(nothing.high > Some(4.0 * 1_048_576.0));
}

#[test]
fn where_no_bound_is_honest_there_is_a_reason() {
    let lost = |losses| profile(4_096, testing::sums(9, 100, 4_096), testing::sums(5, 100, 4_096), losses);
    let reason = |profile: &Profile, value| {
        let found = of_row(profile, &profile.rows[0], value, 0.95);
        assert_eq!((found.low.is_none(), found.high.is_none()), (found.reason.is_some(), found.reason.is_some()));
        assert_eq!(Pool::of([&profile.rows[0]]).guaranteed(profile, Value::InuseSpace, 0.95).err(), {
            of_row(profile, &profile.rows[0], Value::InuseSpace, 0.95).reason
        });
        found.reason
    };
    let unbounded = lost(Losses { unbounded: true, ..Losses::default() });
    let of_peak = lost(Losses { peak_unknown: true, inuse_unbounded: true, ..Losses::default() });
    let mut unread = lost(Losses::default());
    unread.header.unread = Some(Unread { records: 3, of: 9 });
    let at_end = lost(Losses { peak_unknown: true, ..Losses::default() });
    for value in Value::COLUMNS {
        assert_eq!(reason(&unbounded, value), Some(UNBOUNDED));
        assert_eq!(reason(&unread, value), Some(UNREAD));
        assert_eq!(reason(&of_peak, value), value.is_inuse().then_some(PEAK_UNKNOWN));
        assert_eq!(reason(&at_end, value), None);
    }
}

/// Beyond the maximum number of sampling intervals, a bound is added to the next larger interval, so the result is at
/// least as wide.
#[test]
fn any_number_of_intervals_is_bounded() {
    let seen = testing::sums(9, 100, 4_096);
    let mut profile = profile(4_096, seen, seen, Losses::default());
    for interval in (1..=2_000u64).rev().chain(8_000..8_100) {
        let losses = Losses { alloc: bound(1, 10), interval, ..Losses::default() };
        profile.processes.push(Process { losses, ..profile.processes[0].clone() });
    }
    let pool = Pool::whole(&profile);
    let losses = pool.losses(&profile, Value::AllocSpace).into_owned().expect("bounded");
    assert_eq!((losses.missing.len(), losses.largest_interval()), (MOST_INTERVALS, 8_099));
    assert_eq!(total(&losses.missing), bound(2_100, 21_000));
    let found = pool.estimate(&profile, Value::AllocSpace, 0.95);
    let least: u64 = 21_000 + (1..=2_000).chain(8_000..8_100u64).map(|interval| interval - 1).sum::<u64>();
    assert!(found.high > Some(found.estimate + least as f64), "{found:?} {least}");
}

/// Whatever a file claims, figures are finite and lower ends are not negative.
#[test]
fn absurd_losses_are_bounded() {
    let all = bound(u64::MAX, u64::MAX);
    let losses = Losses { alloc: all, inuse_missing: all, inuse_stale: all, interval: u64::MAX, ..Losses::default() };
    let mut profile = profile(524_288, testing::sums(9, 100, 524_288), testing::sums(5, 100, 524_288), losses);
    profile.processes.push(profile.processes[0].clone());
    for criterion in Criterion::ALL {
        profile.header.criterion = criterion;
        for value in Value::COLUMNS {
            let found = Pool::whole(&profile).estimate(&profile, value, 0.95);
            assert!(found.low.is_none_or(|low| low >= 0.0 && low.is_finite()), "{found:?}");
            assert!(found.high.is_none_or(|high| high.is_finite() && high > found.estimate), "{found:?}");
        }
    }
}
