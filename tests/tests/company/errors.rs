//! Kernel errors while a recording runs: none of them ends it or changes its figures, and each kind is reported once.

use std::collections::BTreeSet;
use std::time::Duration;

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::turn;
use heapbpf_tests::map_calls::{ITERATOR, MAP_BATCH, MAP_DELETE, MAP_LOOKUP, MAP_UPDATE, Operation};
use heapbpf_tests::output::{self, Profile, Stats};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::{Outcome, Recorder};
use heapbpf_tests::refusing::Faults;
use heapbpf_tests::scrape::{get, get_with};
use heapbpf_tests::target::{Target, until};

/// Said of an operation that failed.
const RETRYING: &str = "; retrying (";

/// Checks that each kind of failure is reported once, on standard error and in the profile.
fn is_reported_once(outcome: &Outcome, profile: &Profile) {
    let reported: Vec<&str> = outcome.stderr.lines().filter(|line| line.contains(RETRYING)).collect();
    assert!(!reported.is_empty(), "nobody says that something failed:\n{}", outcome.stderr);
    let what = |line: &&str| line.split(" failed: ").next().map(str::to_owned);
    let kinds: BTreeSet<_> = reported.iter().map(what).collect();
    assert_eq!(kinds.len(), reported.len(), "more than once: {reported:?}");
    assert!(profile.notes.iter().any(|note| note.contains("was retried (")), "{:?}", profile.notes);
}

/// Reads and writes of maps and iterators fail now and then, from the beginning to the end of the recording.
#[test]
fn calls_that_fail_now_and_then_cost_nothing() {
    let Some(_turn) = turn("calls_that_fail_now_and_then_cost_nothing") else { return };
    // A cut makes up to six reads in a row, and most cuts must succeed within a few tries.
    for (command, one_in) in [(MAP_LOOKUP, 9), (MAP_BATCH, 6), (MAP_UPDATE, 2), (ITERATOR, 3)] {
        let faults = Faults::of(command);
        let mut target = Target::start(&program("mix"), ["20000"]);
        let recorder = Recorder::of(target.pid(), 1).option("--hook", "probe");
        let (mut recording, address) = recorder.failing(&faults).serve();
        faults.fail_one_in(one_in);
        let truth = target.run();
        until("calls that fail", || {
            // A client waits until the reads work, and gets an answer.
            let answer = get(address, "/debug/pprof/heap");
            assert_eq!(answer.status, 200, "{}", answer.text());
            // A look at who counts a process may fail without a retry.
            recording.lines_by_now();
            faults.failed() >= 3 && recording.said().contains(RETRYING)
        });
        // The last cut is tried for two seconds. On a busy machine, that is a few attempts, each of several calls.
        faults.fail_one_in(4 * one_in);
        let outcome = recording.stop();
        let (profile, stats) = outcome.results();
        checks::sites(&profile, &truth, 1, Compare::All);
        assert_eq!((stats.exact_alloc_objects, stats.exact_alloc_bytes), (truth.allocs(), truth.bytes()), "{stats:?}");
        assert_eq!(stats.lost(), 0, "{stats:?}");
        assert!(stats.other["errors"] > 0, "{command}: {stats:?}");
        is_reported_once(&outcome, &profile);
    }
}

/// Removals fail after a process has ended: what it held is still known, and its calls count once.
#[test]
fn removals_that_fail_count_nothing_twice() {
    let Some(_turn) = turn("removals_that_fail_count_nothing_twice") else { return };
    let faults = Faults::of(MAP_DELETE);
    let (mut target, other) = (Target::start(&program("mix"), ["20000"]), Target::start(&program("mix"), ["1"]));
    let (recording, address) = Recorder::of(target.pid(), 1).pid(other.pid()).failing(&faults).serve();
    let truth = target.run();
    faults.fail_one_in(1);
    drop(target);
    // heapbpf takes over the process's counters some time after its end.
    let errors = || get(address, "/metrics").metric("heapbpf_events_total{name=\"errors\"}");
    until("counters that cannot be taken over", || errors().is_some_and(|errors| errors > 0.0));
    faults.fail_one_in(0);
    let outcome = recording.stop();
    let (profile, stats) = outcome.results();
    checks::sites(&profile, &truth, 1, Compare::AtExit);
    assert_eq!((stats.exact_alloc_objects, stats.exact_alloc_bytes), (truth.allocs(), truth.bytes()), "{stats:?}");
    is_reported_once(&outcome, &profile);
}

/// After a loss, the live map shows what was lost. If it cannot be read, error bars allow for the loss.
#[test]
fn without_the_live_map_error_bars_cover_what_was_lost() {
    let Some(_turn) = turn("without_the_live_map_error_bars_cover_what_was_lost") else { return };
    let faults = Faults::of_operation(&Operation { command: MAP_BATCH, map: "LIVE".into() });
    let mut target = Target::start(&program("mix"), ["200000"]);
    let recorder = Recorder::of(target.pid(), 1).option("--ring-bytes", "64KiB").failing(&faults);
    let recording = recorder.start();
    faults.fail_one_in(1);
    recording.signal(libc::SIGSTOP);
    target.go();
    let truth = target.truth();
    recording.signal(libc::SIGCONT);
    let outcome = recording.stop();
    let (profile, stats) = outcome.results();
    assert!(stats.lost["ring_full"] > 0 && faults.failed() > 0, "{stats:?}");
    let within = |estimate: &output::Estimate, truth: u64| {
        let (low, high) = (estimate.low.expect("a bound"), estimate.high.expect("a bound"));
        assert!((low..=high).contains(&(truth as f64)), "{truth} is not in {estimate:?}");
    };
    within(&profile.totals.alloc_bytes, truth.bytes());
    within(profile.totals.inuse_bytes.as_ref().expect("frees are tracked"), truth.live_bytes());
    is_reported_once(&outcome, &profile);
}

/// Checks the profile of a recording that could not read its counters at the end: every sample is in it, and it says
/// that what is missing is unknown.
fn without_counters(outcome: &Outcome, truth: &heapbpf_tests::truth::Truth) -> Profile {
    let profile: Profile = output::read(&outcome.file("profile.json"));
    let _: Stats = output::read(&outcome.file("stats.json"));
    checks::sites(&profile, truth, 1, Compare::All);
    let total = &profile.totals.alloc_bytes;
    assert!(total.exact.is_none() && total.low.is_none() && total.high.is_none(), "{total:?}");
    let is_reported = |note: &String| note.contains("counters could not be read at the end");
    assert!(profile.notes.iter().any(is_reported), "{:?}", profile.notes);
    profile
}

#[test]
fn counters_that_cannot_be_read_at_the_end_leave_the_samples() {
    let Some(_turn) = turn("counters_that_cannot_be_read_at_the_end_leave_the_samples") else { return };
    let faults = Faults::of(ITERATOR);
    let mut target = Target::start(&program("mix"), ["20000"]);
    let recording = Recorder::of(target.pid(), 1).failing(&faults).start();
    let truth = target.run();
    faults.fail_one_in(1);
    without_counters(&recording.stop(), &truth);
}

/// The interval chosen for the call rate is set as soon as setting it works.
#[test]
fn an_interval_that_cannot_be_set_is_set_later() {
    let Some(_turn) = turn("an_interval_that_cannot_be_set_is_set_later") else { return };
    let faults = Faults::of(MAP_UPDATE);
    // Twelve seconds of calls: once they are over, the interval stays as it was before them.
    let mut target = Target::start(&program("churn"), ["paced", "600000"]);
    let recorder = Recorder::new().pid(target.pid()).option("--interval", "auto").option("--max-overhead", "none");
    // Inside a process, the interval is not in a map.
    let recorder = recorder.option("--hook", "probe");
    let (recording, address) = recorder.failing(&faults).serve();
    let interval = || get(address, "/metrics").metric("heapbpf_sampling_interval");
    let before = interval();
    faults.fail_one_in(1);
    target.go();
    let is_reported = || recording.next_line().contains("setting the sampling interval failed");
    until("an interval that cannot be set", is_reported);
    // 50,000 allocations a second: during this time some hundred samples are taken at the earlier interval.
    std::thread::sleep(Duration::from_secs(1));
    faults.fail_one_in(0);
    until("the interval is set", || interval() != before);
    let bytes = target.churned_bytes();
    assert_eq!(get(address, "/metrics").status, 200);
    let (profile, stats) = recording.stop().results();
    let intervals: BTreeSet<u64> = profile.stacks.iter().map(|stack| stack.interval).collect();
    assert!(intervals.iter().any(|interval| *interval != profile.interval_bytes), "{intervals:?}: {:?}", profile.notes);
    assert!(
        profile.notes.iter().any(|note| note.contains("setting the sampling interval failed")),
        "{:?}",
        profile.notes
    );
    assert!((stats.exact_alloc_bytes as f64 / bytes - 1.0).abs() < 0.01, "{} of {bytes}", stats.exact_alloc_bytes);
}

/// Tests of the long set.
mod long {
    use super::*;

    /// A recording that cannot read its counters for half a minute cannot know what it lost: it ends, with the profile
    /// so far and the reason.
    #[test]
    fn counters_that_cannot_be_read_for_long_end_the_recording_with_its_profile() {
        let Some(_turn) = turn("counters_that_cannot_be_read_for_long_end_the_recording_with_its_profile") else {
            return;
        };
        let faults = Faults::of(ITERATOR);
        let mut target = Target::start(&program("mix"), ["20000"]);
        let (recording, address) = Recorder::of(target.pid(), 1).failing(&faults).serve();
        let truth = target.run();
        faults.fail_one_in(1);
        let waiting = std::thread::spawn(move || get_with(address, "/debug/pprof/heap", "").status);
        let outcome = recording.ends();
        assert_eq!(outcome.status.code(), Some(1), "{}", outcome.stderr);
        assert!(outcome.stderr.contains("ended early; the profile has what was recorded"), "{}", outcome.stderr);
        assert_eq!(waiting.join().expect("an answer"), 503);
        let profile = without_counters(&outcome, &truth);
        let is_reported = |note: &String| {
            note.contains("the recording ended early: the kernel's counters could not be read for 30 s")
        };
        assert!(profile.notes.iter().any(is_reported), "{:?}", profile.notes);
        assert!(faults.failed() > 5, "it was tried again: {}", faults.failed());
        assert!(faults.failed() < 100, "with growing pauses: {}", faults.failed());
    }
}
