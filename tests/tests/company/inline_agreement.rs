//! Probes and inline hooks agree with each other and with the truth.

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::turn;
use heapbpf_tests::inline::{Hook, counted_exactly, record};
use heapbpf_tests::program::program;
use heapbpf_tests::torture::{hooks, name_of, seen, times};

/// With each way of hooking, calls and bytes are exact, and figures of sites are true.
#[test]
fn both_ways_of_hooking_agree_with_the_truth() {
    let Some(_turn) = turn("both_ways_of_hooking_agree_with_the_truth") else { return };
    for (interval, operations) in [(4 << 10, "60000"), (512 << 10, "400000")] {
        for (hook, seed) in [(Hook::Probe, "2"), (Hook::Inline, "3")] {
            let (profile, stats, truth) = record(&program("mix"), &[operations], hook, interval, &[["--seed", seed]]);
            counted_exactly(&stats, &truth);
            checks::sites(&profile, &truth, interval, Compare::All);
        }
    }
}

/// Threads move between CPUs all the time, and no call, byte or block is lost or counted twice.
#[test]
fn eight_threads_are_exact_in_every_run() {
    let Some(_turn) = turn("inline_eight_threads_are_exact_in_every_run") else { return };
    for hook in hooks() {
        let (mut samples, rounds) = (0, times(1));
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
