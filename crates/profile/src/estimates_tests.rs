use super::*;
use crate::model::RowKey;
use crate::testing;
use sampler_ebpf::constants::draw_constants;
use sampler_ebpf::countdown::step;
use sampler_ebpf::geometric;

#[test]
fn a_format_that_tells_of_no_process_has_no_exact_count() {
    let nothing = |samples_known| {
        let mut profile = Profile { processes: Vec::new(), rows: Vec::new(), ..testing::small() };
        profile.header.samples_known = samples_known;
        profile
    };
    assert_eq!(exact(&nothing(true), None, Value::AllocSpace), Some(0));
    assert_eq!(exact(&nothing(false), None, Value::AllocSpace), None);
}

#[test]
fn pools_keep_intervals_apart_and_add_up() {
    let profile = testing::small();
    let pool = Pool::of(&profile.rows);
    for value in Value::COLUMNS {
        let expected: f64 = profile.rows.iter().map(|row| value.of(row)).sum();
        assert!((pool.total(value) - expected).abs() < 1e-6 * expected);
        assert_eq!(pool.estimate(&profile, value, 0.95).estimate, pool.total(value));
    }
    assert_eq!(pool.parts.len(), 2);
    assert_eq!(pool.samples(Value::AllocSpace), 60);
}

/// Half of the bytes were allocated under an R that yielded no sample. The interval can reach the true value only if
/// that R is allowed for.
#[test]
fn an_interval_without_a_sample_is_allowed_for() {
    let profile = testing::small();
    let mut pool = Pool::of(&profile.rows[3..4]);
    let before = pool.estimate(&profile, Value::AllocSpace, 0.95);
    pool.allow_for(&[0, 524_288, 8 << 20]);
    let after = pool.estimate(&profile, Value::AllocSpace, 0.95);
    assert_eq!((after.estimate, pool.parts.len()), (before.estimate, 2));
    let above = |figure: Estimate| figure.high.expect("an interval") - figure.estimate;
    let unseen = f64::from(8 << 20) * 3.688_879;
    assert!((above(after) / above(before).hypot(unseen) - 1.0).abs() < 1e-6);
    let guaranteed = pool.guaranteed(&profile, Value::AllocSpace, 0.95).expect("bytes");
    assert!(guaranteed.high > unseen && guaranteed.low >= 512.0);
    assert!(pool.guaranteed(&profile, Value::AllocObjects, 0.95).is_err());
}

/// Seeded: 4,000 recordings in which a stack allocates 3 R, then R is raised sixteenfold, then the stack allocates one
/// new R. The interval holds the sum at least as often as it claims, minus 4 standard errors (0.35 %). Without allowing
/// for the second R, under which some recordings have no sample of the stack, it would hold the sum in two thirds of
/// them.
#[test]
fn a_raised_sampling_interval_is_covered() {
    const INTERVALS: [u64; 2] = [1_000, 16_000];
    let profile = Profile { rows: Vec::new(), ..testing::small() };
    let row = testing::small().rows[0].clone();
    let truth = 19_000.0;
    let mut state = sampler_ebpf::rng::seed(9, 0);
    let (mut with, mut without) = (0, 0);
    for _ in 0..4_000 {
        let mut pool = Pool::default();
        for (interval, blocks) in INTERVALS.into_iter().zip([300, 1_600]) {
            let constants = draw_constants(interval).expect("in range");
            let mut draw = || geometric::draw(sampler_ebpf::rng::next(&mut state), &constants);
            let (mut remaining, mut alloc) = (draw(), SampleSums::default());
            for _ in 0..blocks {
                if let Some(offset) = step(&mut remaining, 10) {
                    alloc.record(10, 10, offset, interval);
                    remaining = draw();
                }
            }
            if alloc.samples > 0 {
                let key = RowKey { interval, ..row.key.clone() };
                pool.add(&Row { key, alloc, ..row.clone() });
            }
        }
        let holds = |pool: &Pool| {
            let found = pool.estimate(&profile, Value::AllocSpace, 0.95);
            i32::from(found.low <= Some(truth) && Some(truth) <= found.high)
        };
        without += holds(&pool);
        pool.allow_for(&INTERVALS);
        with += holds(&pool);
    }
    assert!(f64::from(with) / 4_000.0 > 0.95 - 4.0 * 0.0035 && f64::from(without) / 4_000.0 < 0.75, "{with} {without}");
}

#[test]
fn without_samples_there_is_no_error_bar() {
    let mut profile = testing::small();
    profile.header.samples_known = false;
    let estimate = Pool::of(&profile.rows).estimate(&profile, Value::AllocSpace, 0.95);
    assert_eq!((estimate.low, estimate.reason), (None, Some(NO_SAMPLES)));
}

#[test]
fn time_windows_leave_the_corrected_figure_alone() {
    let mut profile = testing::small();
    profile.header.time_windows = true;
    profile.rows[0].alloc.bytes_correction = 1000.0;
    let pool = Pool::of(&profile.rows);
    let estimate = pool.estimate(&profile, Value::AllocSpace, 0.95);
    assert!((estimate.estimate - pool.raw_total(Value::AllocSpace) - 1000.0).abs() < 1e-6);
    assert_eq!((estimate.low, estimate.high, estimate.reason), (None, None, Some(TIME_WINDOWS)));
    assert!(pool.estimate(&profile, Value::InuseSpace, 0.95).low.is_some());
    // A process that was hooked throughout was counted throughout.
    assert_eq!(exact(&profile, Some(0), Value::AllocSpace), Some(60_000_000));
    profile.processes[0].coverage = 0.9999;
    assert_eq!(exact(&profile, Some(0), Value::AllocSpace), None);
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

#[test]
fn merged_sets_of_processes_have_those_of_both() {
    let of = |processes: &[usize]| {
        let mut set = ProcessSet::default();
        processes.iter().for_each(|process| set.insert(*process));
        set
    };
    let many: Vec<usize> = (0..100).map(|process| 3 * process).collect();
    let all: [&[usize]; 6] = [&[], &[0], &[7], &[5, 2], &[298, 1], &many];
    for a in all {
        for b in all {
            let (mut merged, both) = (of(a), [a, b].concat());
            merged.merge(&of(b));
            assert_eq!(merged, of(&both));
            assert!(merged.iter().eq(BTreeSet::from_iter(both)), "{merged:?}");
        }
    }
}
