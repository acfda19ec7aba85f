//! Estimated figures per call site, compared with the exact truth.
//!
//! Tolerances are those of `truth::Sum::tolerance`: each check rejects a correct estimate with probability 5.7e-7 at
//! most (that of a two-sided 5 σ test), for any mix of sizes.
//!
//! Programs that take samples at full speed take at most 15,000 of them: the ring holds as many stacks, even if heapbpf
//! gets no CPU meanwhile.

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::turn;
use heapbpf_tests::inline::counted_exactly;
use heapbpf_tests::output::{Profile, Stats};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;
use heapbpf_tests::truth::Truth;

/// Records one program from READY to its report.
fn record(name: &str, arguments: &[&str], interval: u64, seed: u64) -> (Profile, Stats, Truth) {
    let mut target = Target::start(&program(name), arguments);
    let results = Recorder::of(target.pid(), interval).option("--seed", &seed.to_string()).results_of(&mut target);
    assert_eq!(results.0.interval_bytes, interval);
    results
}

#[test]
fn twenty_sites_are_exact_at_interval_1() {
    let Some(_turn) = turn("twenty_sites_are_exact_at_interval_1") else { return };
    let (profile, stats, truth) = record("mix", &["12000"], 1, 1);
    checks::sites(&profile, &truth, 1, Compare::All);
    counted_exactly(&stats, &truth);
    assert_eq!(stats.unsampled, 0, "{stats:?}");
    assert_eq!(profile.totals.alloc_bytes.low, profile.totals.alloc_bytes.high, "nothing is uncertain");
}

/// Also checks that the stacks' 95 % confidence intervals contain the truth as often as they should. Each of 3 × 20
/// stacks with at least one sample misses with probability 6 % at most (the worst case of docs/sampling.md). More than
/// 16 misses of 60 have probability 1e-7.
#[test]
fn twenty_sites_are_true_at_64_kib() {
    const INTERVAL: u64 = 64 << 10;
    let Some(_turn) = turn("twenty_sites_are_true_at_64_kib") else { return };
    let (mut missed, mut listed) = (0, 0);
    for seed in 1..=3 {
        let (profile, stats, truth) = record("mix", &["300000"], INTERVAL, seed);
        checks::sites(&profile, &truth, INTERVAL, Compare::All);
        counted_exactly(&stats, &truth);
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
    let (profile, stats, truth) = record("threads", &["4480"], 4096, 1);
    checks::sites(&profile, &truth, 4096, Compare::All);
    counted_exactly(&stats, &truth);
}

/// A failed call is no allocation, whether or not it would have been sampled.
#[test]
fn interval_0_takes_no_samples_and_counts_everything() {
    let Some(_turn) = turn("interval_0_takes_no_samples_and_counts_everything") else { return };
    for (name, times) in [("mix", "100000"), ("refused", "200"), ("reallocs", "200")] {
        let mut target = Target::start(&program(name), [times]);
        let (profile, stats, truth) = Recorder::of(target.pid(), 0).results_of(&mut target);
        assert_eq!((stats.exact_alloc_objects, stats.exact_alloc_bytes), (truth.allocs(), truth.bytes()), "{stats:?}");
        assert!(stats.submitted == 0 && profile.stacks.is_empty(), "{name}: stacks without a sample: {stats:?}");
        assert_eq!(checks::exact(profile.process(target.pid())), (Some(truth.bytes()), Some(truth.allocs())), "{name}");
    }
}

/// Of many allocations of one size, the share sampled is 1 − (1 − 1/R)^size.
#[test]
fn one_size_is_sampled_with_its_probability() {
    let Some(_turn) = turn("one_size_is_sampled_with_its_probability") else { return };
    const TIMES: u64 = 100_000;
    for (times, size, interval) in [
        (TIMES, 1, 100),
        (TIMES, 0, 10),
        (TIMES, 100, 4096),
        (TIMES / 5, 4096, 4096),
        (TIMES, 700, 64 << 10),
        (TIMES, 3000, 512 << 10),
    ] {
        let (profile, stats, truth) = record("pairs", &[&times.to_string(), "1", &size.to_string()], interval, 3);
        counted_exactly(&stats, &truth);
        checks::sampled(stats.submitted, size, times, interval);
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
