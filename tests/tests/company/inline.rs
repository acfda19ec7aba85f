//! Inline hooks: calls are counted inside the process, and what is sampled is the same as with probes.

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::turn;
use heapbpf_tests::inline::{self, Hook, Recorded, counted_exactly};
use heapbpf_tests::program::program;

/// Records one program from READY to its report, hooked inline.
fn record(name: &str, arguments: &[&str], interval: u64) -> Recorded {
    inline::record(&program(name), arguments, Hook::Inline, interval, &[])
}

#[test]
fn twenty_sites_are_exact_at_interval_1() {
    let Some(_turn) = turn("inline_twenty_sites_are_exact_at_interval_1") else { return };
    let (profile, stats, truth) = record("mix", &["30000"], 1);
    checks::sites(&profile, &truth, 1, Compare::All);
    counted_exactly(&stats, &truth);
    assert_eq!(stats.unsampled, 0, "{stats:?}");
    assert_eq!(profile.totals.alloc_bytes.low, profile.totals.alloc_bytes.high, "nothing is uncertain");
}

#[test]
fn eight_threads_leave_all_their_blocks_at_interval_1() {
    let Some(_turn) = turn("inline_eight_threads_leave_all_their_blocks_at_interval_1") else { return };
    let (profile, stats, truth) = record("threads", &["2560"], 1);
    assert_eq!(truth.live_allocs(), 1024);
    checks::sites(&profile, &truth, 1, Compare::All);
    counted_exactly(&stats, &truth);
}

#[test]
fn twenty_sites_are_true_at_4_kib() {
    let Some(_turn) = turn("inline_twenty_sites_are_true_at_4_kib") else { return };
    let (profile, stats, truth) = record("mix", &["200000"], 4 << 10);
    checks::sites(&profile, &truth, 4 << 10, Compare::All);
    counted_exactly(&stats, &truth);
    assert!(stats.unsampled > 0 && stats.submitted > 0, "{stats:?}");
}
