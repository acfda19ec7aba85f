use super::*;
use crate::adjust::Adjustments;
use crate::diff::{DiffOptions, diff};
use crate::merge::merge;
use crate::model::LossBound;
use crate::read;
use crate::testing;

/// One process that allocated `blocks` blocks of `size` bytes under R = `interval`; every second sample was lost.
fn half_lost(blocks: u64, size: u64, interval: u64) -> Profile {
    let mut profile = testing::small();
    profile.header.interval = interval;
    profile.processes.truncate(1);
    profile.rows.truncate(1);
    let row = &mut profile.rows[0];
    row.key.interval = interval;
    let weight = testing::sums(1, size, interval).objects;
    let samples = (blocks as f64 / weight).round() as u64;
    (row.alloc, row.inuse) = (testing::sums(samples / 2, size, interval), SampleSums::default());
    let process = &mut profile.processes[0];
    process.losses.alloc = LossBound { samples: samples - samples / 2, sampled_bytes: (samples - samples / 2) * size };
    process.exact_alloc_bytes = Some(blocks * size);
    process.exact_alloc_objects = Some(blocks);
    add_rows(&mut profile);
    profile
}

fn totals(profile: &Profile) -> (f64, f64) {
    let pool = Pool::whole(profile);
    (pool.total(Value::AllocSpace), pool.total(Value::AllocObjects))
}

#[test]
fn if_everything_is_sampled_the_total_is_the_exact_count() {
    let profile = half_lost(1_000, 96, 1);
    assert_eq!(totals(&profile), (96_000.0, 1_000.0));
    let lost = profile.rows.last().expect("a row");
    assert_eq!((lost.alloc.bytes, lost.alloc.objects, lost.alloc.samples), (48_000.0, 500.0, 0));
    assert_eq!(lost.key.stack.frames[0].function.as_deref(), Some(RECORDS_LOST));
    let mut again = profile.clone();
    add_rows(&mut again);
    assert_eq!(again.rows.len(), profile.rows.len(), "it is added once");
}

#[test]
fn the_interval_belongs_to_the_samples_and_holds_the_corrected_figure() {
    for (blocks, size, interval) in [(1_000, 96, 1), (1_000_000, 96, 4_096), (3_000, 70_000, 4_096)] {
        let profile = half_lost(blocks, size, interval);
        let truth = (blocks * size) as f64;
        for value in [Value::AllocSpace, Value::AllocObjects] {
            let found = Pool::whole(&profile).estimate(&profile, value, 0.95);
            let truth = if value.is_bytes() { truth } else { blocks as f64 };
            let (low, high) = (found.low.expect("one size"), found.high.expect("one size"));
            assert!(low <= found.estimate && found.estimate <= high, "{found:?}");
            assert!(low <= truth && truth <= high, "{truth}: {found:?}");
            assert!((found.estimate / truth - 1.0).abs() < 0.02, "{truth}: {found:?}");
            let raw = Pool::whole(&profile).raw_estimate(&profile, value, 0.95, &Default::default());
            assert_eq!(raw, found);
            let lost = crate::estimates::of_row(&profile, &profile.rows[1], value, 0.95);
            assert!(lost.low <= Some(lost.estimate) && Some(lost.estimate) <= lost.high, "{lost:?}");
        }
    }
}

/// Differences due to chance or to later counts are not taken for lost records.
#[test]
fn no_more_is_added_than_the_lost_samples_can_stand_for() {
    let mut profile = half_lost(1_000_000, 96, 4_096);
    let range = (profile.processes[0].losses.alloc.samples as f64 * 4_096.0, profile.rows[1].alloc.bytes);
    for (exact, expected) in [(0, range.0), (u64::MAX, 1.05 * range.0)] {
        profile.rows.truncate(1);
        profile.processes[0].exact_alloc_bytes = Some(exact);
        add_rows(&mut profile);
        let found = profile.rows[1].alloc.bytes;
        assert!((found / expected - 1.0).abs() < 0.05, "{found} {expected}");
    }
    profile.rows.truncate(1);
    profile.processes[0].exact_alloc_bytes = None;
    add_rows(&mut profile);
    assert!((profile.rows[1].alloc.bytes / range.0 - 1.0).abs() < 0.05, "without a count: what the samples stand for");
}

#[test]
fn what_was_not_counted_is_not_corrected() {
    let mut profile = half_lost(1_000, 96, 1);
    profile.rows.truncate(1);
    for change in [
        |profile: &mut Profile| profile.processes[0].losses.unbounded = true,
        |profile: &mut Profile| profile.header.unread = Some(Default::default()),
        |profile: &mut Profile| profile.processes[0].losses.alloc = LossBound::default(),
    ] {
        let mut other = profile.clone();
        change(&mut other);
        add_rows(&mut other);
        assert_eq!(other.rows.len(), 1);
    }
}

/// Every format that is read back keeps the corrected totals, and merging adds them.
#[test]
fn formats_and_sums_agree() {
    let profile = half_lost(1_000_000, 96, 4_096);
    for name in ["json", "pprof", "parquet", "heap_v2"] {
        let back = read::parse(&testing::written(&profile, name)).expect(name);
        let (bytes, objects) = totals(&back);
        let expected = totals(&profile);
        assert!((bytes - expected.0).abs() <= 1.0 && (objects - expected.1).abs() <= 1.0, "{name}: {bytes} {objects}");
        if ["json", "parquet"].contains(&name) {
            let estimate = |profile: &Profile| Pool::whole(profile).estimate(profile, Value::AllocSpace, 0.95);
            let (found, expected) = (estimate(&back), estimate(&profile));
            assert!(
                (found.high.expect(name) / expected.high.expect(name) - 1.0).abs() < 1e-9,
                "{found:?} {expected:?}"
            );
            assert!((found.low.expect(name) / expected.low.expect(name) - 1.0).abs() < 1e-9, "{found:?} {expected:?}");
        }
        if name == "json" {
            let merged = merge(vec![back, profile.clone()]).expect("the same criterion");
            assert!((totals(&merged).0 / (2.0 * expected.0) - 1.0).abs() < 1e-9);
        }
    }
}

#[test]
fn a_comparison_is_of_the_corrected_totals() {
    let (before, after) = (half_lost(1_000_000, 96, 4_096), half_lost(2_000_000, 96, 4_096));
    let options = DiffOptions { values: vec![Value::AllocSpace], ..DiffOptions::default() };
    let found = diff(&before, &after, &options);
    let total = &found.totals[0];
    assert!((total.before.estimate / 96e6 - 1.0).abs() < 0.02 && (total.after.estimate / 192e6 - 1.0).abs() < 0.02);
    let (low, high) = (total.change.low.expect("an interval"), total.change.high.expect("an interval"));
    assert!(low <= total.change.estimate && total.change.estimate <= high, "{total:?}");
}

#[test]
fn adjustments_keep_the_row() {
    let mut calibrated = half_lost(1_000_000, 96, 4_096);
    calibrated.processes[0].exact_alloc_bytes = Some(97_000_000);
    Adjustments { calibrate: true, ..Adjustments::default() }.apply(&mut calibrated).expect("counted");
    assert!((totals(&calibrated).0 - 97e6).abs() < 1.0, "{:?}", totals(&calibrated));
}

#[test]
fn in_time_windows_lost_samples_stand_for_as_much_as_the_others() {
    let mut profile = half_lost(1_000_000, 96, 4_096);
    let expected = profile.rows[1].alloc.bytes * 3.0;
    profile.rows.truncate(1);
    profile.header.time_windows = true;
    profile.rows[0].alloc.bytes_correction = 2.0 * profile.rows[0].alloc.bytes;
    add_rows(&mut profile);
    assert!((profile.rows[1].alloc.bytes / expected - 1.0).abs() < 0.05);
}
