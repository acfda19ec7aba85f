//! Probes and inline hooks agree with each other and with the truth.

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::turn;
use heapbpf_tests::inline::{Hook, counted_exactly, record};
use heapbpf_tests::program::program;
use heapbpf_tests::torture::{hooks, name_of, seen};
use heapbpf_tests::truth::{Law, Sum, Truth};

/// Variable that sets the number of recordings with each way of hooking at each interval, and the number of runs of
/// eight threads. Both are 1 by default.
const ROUNDS: &str = "HEAPBPF_TEST_ROUNDS";

fn rounds() -> u32 {
    std::env::var(ROUNDS).ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(1)
}

/// Sum of a figure over recordings with different seeds, which are independent of each other.
#[derive(Clone, Copy, Default)]
struct Pooled {
    estimate: f64,
    law: Sum,
}

impl Pooled {
    fn add(&mut self, estimate: f64, law: Sum) {
        self.estimate += estimate;
        self.law.truth += law.truth;
        self.law.variance += law.variance;
        self.law.step = self.law.step.max(law.step);
    }

    /// Checks that the sum is close to `to`, and prints the difference in σ of a sum with this law. It exceeds
    /// [`Sum::tolerance`] with a probability of at most 5.7e-7.
    fn compare(&self, what: &str, to: f64, law: Sum) {
        let (off, tolerance) = (self.estimate - to, law.tolerance());
        println!("{what}: off by {:+.2} σ, {:.1} allowed", off / law.variance.sqrt(), tolerance / law.variance.sqrt());
        assert!(off.abs() <= tolerance, "{what}: {} instead of {to} ± {tolerance}", self.estimate);
    }
}

const FIGURES: [&str; 4] = ["bytes", "objects", "bytes in use", "objects in use"];

/// Combined laws of all sites, in the order of [`FIGURES`].
fn laws(truth: &Truth, interval: u64) -> [Sum; 4] {
    let of = |live: bool| {
        let rows = truth.sites.iter().flat_map(|site| &site.sizes);
        Law::of(rows.map(|&[size, allocs, alive]| (size, if live { alive } else { allocs })), interval)
    };
    let (all, live) = (of(false), of(true));
    [all.bytes, all.objects, live.bytes, live.objects]
}

/// Totals of both ways of hooking agree with the truth and with each other.
#[test]
fn both_ways_of_hooking_agree_with_the_truth_and_with_each_other() {
    agree("both_ways_of_hooking_agree_with_the_truth_and_with_each_other", rounds());
}

/// Compares totals over this many seeds, with each way of hooking, with the truth and with each other. Calls and bytes
/// are exact, and each recording is correct by itself. There are 24 comparisons of sums. If everything is right, each
/// fails with a probability of at most 5.7e-7.
fn agree(case: &str, rounds: u32) {
    let Some(_turn) = turn(case) else { return };
    // At 512 KiB, about one call in 500 is sampled.
    for (interval, operations) in [(4 << 10, "60000"), (512 << 10, "400000")] {
        let mut pooled = [[Pooled::default(); FIGURES.len()]; 2];
        for (hook, pooled) in [Hook::Probe, Hook::Inline].into_iter().zip(&mut pooled) {
            for seed in 1..=rounds {
                // No seed is used twice.
                let seed = format!("{}", 2 * seed + u32::from(hook == Hook::Inline));
                let options = [["--seed", &seed]];
                let (profile, stats, truth) = record(&program("mix"), &[operations], hook, interval, &options);
                counted_exactly(&stats, &truth);
                checks::sites(&profile, &truth, interval, Compare::All);
                let live = [&profile.totals.inuse_bytes, &profile.totals.inuse_objects];
                let [bytes, objects] = live.map(|figure| figure.as_ref().expect("frees are tracked").value());
                let totals = [profile.totals.alloc_bytes.value(), profile.totals.alloc_objects.value(), bytes, objects];
                for ((pooled, estimate), law) in pooled.iter_mut().zip(totals).zip(laws(&truth, interval)) {
                    pooled.add(estimate, law);
                }
            }
        }
        let [probe, inline] = pooled;
        for ((figure, probe), inline) in FIGURES.into_iter().zip(probe).zip(inline) {
            let what = format!("{figure} at {interval}");
            probe.compare(&format!("probes, {what}"), probe.law.truth, probe.law);
            inline.compare(&format!("inline hooks, {what}"), inline.law.truth, inline.law);
            let of_both = Sum { variance: probe.law.variance + inline.law.variance, ..probe.law };
            inline.compare(&format!("inline hooks against probes, {what}"), probe.estimate, of_both);
        }
    }
}

/// Threads move between CPUs all the time, and no call, byte or block is lost or counted twice.
#[test]
fn eight_threads_are_exact_in_every_run() {
    let Some(_turn) = turn("inline_eight_threads_are_exact_in_every_run") else { return };
    for hook in hooks() {
        let (mut samples, rounds) = (0, rounds());
        for _ in 0..rounds {
            let (profile, stats, truth) = record(&program("threads"), &["2560", "5"], hook, 1, &[]);
            assert_eq!(truth.live_allocs(), 1024);
            checks::sites(&profile, &truth, 1, Compare::All);
            counted_exactly(&stats, &truth);
            assert_eq!((stats.unsampled, stats.estimated_alloc_bytes as u64), (0, truth.bytes()), "{stats:?}");
            samples += stats.submitted;
        }
        let what = format!("each run equals the truth: {samples} calls, all sampled, none lost");
        seen("eight threads that move between processors, at interval 1", name_of(hook), rounds, &what);
    }
}

/// Tests of the long set.
mod long {
    use super::*;

    #[test]
    fn both_ways_of_hooking_agree_over_several_seeds() {
        agree("both_ways_of_hooking_agree_over_several_seeds", 5);
    }
}
