//! Inline hooks: calls are counted inside the process, and what is sampled is the same as with probes.

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::turn;
use heapbpf_tests::inline_hooks::{counted_exactly, is_hooked, mapped};
use heapbpf_tests::output::{Profile, Stats};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;
use heapbpf_tests::truth::Truth;

/// Records one program from READY to its report, hooked inline.
fn record(name: &str, arguments: &[&str], interval: u64) -> (Profile, Stats, Truth) {
    let mut target = Target::start(&program(name), arguments);
    let pid = target.pid();
    let recording = Recorder::of(pid, interval).option("--hook", "inline").flag("--no-follow").flag("-v").start();
    assert!(is_hooked(pid), "it is not hooked inline: {}", recording.said());
    let truth = target.run();
    let outcome = recording.stop();
    let (profile, stats) = outcome.results();
    assert_eq!(mapped(pid), [""; 0], "not everything is taken out: {}", outcome.stderr);
    (profile, stats, truth)
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
