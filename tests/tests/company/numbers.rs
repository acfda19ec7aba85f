//! Estimated figures per call site, compared with the exact truth.
//!
//! Tolerances are those of `truth::Sum::tolerance`: each check rejects a correct estimate with probability 5.7e-7 at
//! most (that of a two-sided 5 σ test), for any mix of sizes.

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::turn;
use heapbpf_tests::output::{Profile, Stats};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;
use heapbpf_tests::truth::Truth;

/// Records one program from READY to its report.
fn record(name: &str, arguments: &[&str], interval: u64, seed: u64) -> (Profile, Stats, Truth) {
    let mut target = Target::start(&program(name), arguments);
    let recording = Recorder::of(target.pid(), interval).option("--seed", &seed.to_string()).start();
    let truth = target.run();
    let (profile, stats) = recording.stop().results();
    assert_eq!(profile.interval_bytes, interval);
    (profile, stats, truth)
}

/// Checks for a program that allocates only at its sites: every call is a hit, and totals are exact.
fn counted_exactly(stats: &Stats, truth: &Truth) {
    assert_eq!(stats.hits, truth.allocs() + truth.failed + truth.abandoned, "{stats:?}");
    assert_eq!(stats.exact_alloc_objects, truth.allocs(), "{stats:?}");
    assert_eq!(stats.exact_alloc_bytes, truth.bytes(), "{stats:?}");
}

#[test]
fn twenty_sites_are_exact_at_interval_1() {
    let Some(_turn) = turn("twenty_sites_are_exact_at_interval_1") else { return };
    let (profile, stats, truth) = record("mix", &["30000"], 1, 1);
    checks::sites(&profile, &truth, 1, Compare::All);
    counted_exactly(&stats, &truth);
    assert_eq!((stats.unsampled, stats.lost()), (0, 0), "{stats:?}");
    assert_eq!(profile.totals.alloc_bytes.low, profile.totals.alloc_bytes.high, "nothing is uncertain");
}

#[test]
fn twenty_sites_are_true_at_64_kib() {
    twenty_sites_are_true_at(64 << 10, "300000");
}

/// Also checks that the stacks' 95 % confidence intervals contain the truth as often as they should. Each of 3 × 20
/// stacks with at least one sample misses with probability 6 % at most (the worst case of docs/sampling.md). More than
/// 16 misses of 60 have probability 1e-7.
fn twenty_sites_are_true_at(interval: u64, ops: &str) {
    let Some(_turn) = turn("twenty_sites_are_true") else { return };
    let (mut missed, mut listed) = (0, 0);
    for seed in 1..=3 {
        let (profile, stats, truth) = record("mix", &[ops], interval, seed);
        checks::sites(&profile, &truth, interval, Compare::All);
        counted_exactly(&stats, &truth);
        assert_eq!(stats.lost(), 0, "{stats:?}");
        let (m, l) = checks::missed(&profile, &truth);
        missed += m;
        listed += l;
        assert!(checks::z(&profile.totals.alloc_bytes).abs() < 5.0, "{:?}", profile.totals.alloc_bytes);
    }
    println!("95 % intervals: {missed} of {listed} miss the truth");
    assert!(listed >= 45, "only {listed} stacks are comparable");
    assert!(missed <= 16, "{missed} of {listed} intervals miss the truth");
}

#[test]
fn eight_threads_are_true_at_4_kib() {
    let Some(_turn) = turn("eight_threads_are_true_at_4_kib") else { return };
    let (profile, stats, truth) = record("threads", &["25600"], 4096, 1);
    checks::sites(&profile, &truth, 4096, Compare::All);
    counted_exactly(&stats, &truth);
}

#[test]
fn eight_threads_of_pairs_are_true_at_64_kib() {
    let Some(_turn) = turn("eight_threads_of_pairs_are_true_at_64_kib") else { return };
    let (profile, stats, truth) = record("pairs", &["400000", "8", "640"], 64 << 10, 1);
    checks::sites(&profile, &truth, 64 << 10, Compare::All);
    counted_exactly(&stats, &truth);
}

#[test]
fn interval_0_takes_no_samples_and_counts_everything() {
    let Some(_turn) = turn("interval_0_takes_no_samples_and_counts_everything") else { return };
    let mut target = Target::start(&program("mix"), ["100000"]);
    let recording = Recorder::of(target.pid(), 0).start();
    let truth = target.run();
    let (profile, stats) = recording.stop().results();
    counted_exactly(&stats, &truth);
    assert_eq!((stats.submitted, stats.failed, stats.lost()), (0, 0, 0));
    assert!(profile.stacks.is_empty(), "{} stacks without a sample", profile.stacks.len());
    assert_eq!(checks::exact(profile.process(target.pid())), (Some(truth.bytes()), Some(truth.allocs())));
}

/// A failed call is no allocation, whether or not it would have been sampled.
#[test]
fn interval_0_leaves_out_the_large_calls_that_fail() {
    let Some(_turn) = turn("interval_0_leaves_out_the_large_calls_that_fail") else { return };
    for name in ["refused", "reallocs"] {
        let mut target = Target::start(&program(name), ["200"]);
        let recording = Recorder::of(target.pid(), 0).start();
        let truth = target.run();
        let (profile, stats) = recording.stop().results();
        // Some overflows are detected before the probe, so hits are not compared.
        assert_eq!((stats.exact_alloc_objects, stats.exact_alloc_bytes), (truth.allocs(), truth.bytes()), "{stats:?}");
        assert_eq!(checks::exact(profile.process(target.pid())), (Some(truth.bytes()), Some(truth.allocs())), "{name}");
    }
}

/// Of 100,000 allocations of one size, the share sampled is 1 − (1 − 1/R)^size.
#[test]
fn one_size_is_sampled_with_its_probability() {
    let Some(_turn) = turn("one_size_is_sampled_with_its_probability") else { return };
    const TIMES: u64 = 100_000;
    for (size, interval) in [(1, 100), (0, 10), (100, 4096), (4096, 4096), (700, 64 << 10), (3000, 512 << 10)] {
        let (profile, stats, truth) = record("pairs", &[&TIMES.to_string(), "1", &size.to_string()], interval, 3);
        counted_exactly(&stats, &truth);
        assert_eq!(stats.lost(), 0);
        checks::sampled(stats.submitted, size, TIMES, interval);
        checks::sites(&profile, &truth, interval, Compare::All);
    }
}

#[test]
fn one_seed_gives_the_same_draws_again() {
    let Some(_turn) = turn("one_seed_gives_the_same_draws_again") else { return };
    let run = |seed| checks::site_sums(&record("mix", &["50000"], 4096, seed).0, None);
    let (first, again, other) = (run(7), run(7), run(8));
    assert_eq!(first.len(), again.len());
    for ((site, a), (_, b)) in first.iter().zip(&again) {
        assert_eq!(a.samples, b.samples, "{site}");
        // The stacks of a site are added up in varying order.
        assert!(a.figures.iter().zip(b.figures).all(|(a, b)| checks::close(*a, b)), "{site}: {a:?}, {b:?}");
    }
    assert_ne!(first, other);
}
