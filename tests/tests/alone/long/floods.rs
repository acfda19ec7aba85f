//! Floods of what a target can have many of: mappings, stacks, threads, short processes. Each is recorded correctly, or
//! the profile says what is missing, in bounded memory. `cargo xtask torture flood` prints the figures.

use std::fs;
use std::time::{Duration, Instant};

use heapbpf_tests::checks;
use heapbpf_tests::environment::{Setting, turn};
use heapbpf_tests::inline::{Hook, recorder};
use heapbpf_tests::output::{Profile, Stats};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::{Target, cpu_time};
use heapbpf_tests::torture::{accounted, lasting, name_of, not_run, readable, seen};

/// Half of the unit's memory limit for heapbpf.
const MOST_MEMORY_BYTES: u64 = 1 << 30;
const MAX_MAP_COUNT: &str = "/proc/sys/vm/max_map_count";

/// Whether this is the short round of the test suite.
fn is_short() -> bool {
    lasting(0).is_zero()
}

/// Describes the cost. Checks that the memory is bounded.
fn cost(stats: &Stats, until_recording: Duration, last_profile: Duration) -> String {
    let Stats { daemon_cpu_seconds, daemon_peak_rss_bytes, .. } = stats;
    assert!(*daemon_peak_rss_bytes < MOST_MEMORY_BYTES, "{stats:?}");
    format!(
        "recorded after {:.1} s, last profile after {:.1} s; {daemon_cpu_seconds:.1} s of processor time and {} MiB at most",
        until_recording.as_secs_f64(),
        last_profile.as_secs_f64(),
        daemon_peak_rss_bytes >> 20
    )
}

/// Records every allocation of a target that reports its truth, and checks that totals are exact. Returns the profile,
/// the stats and the cost.
fn recorded_exactly(mut target: Target, recorder: Recorder) -> (Profile, Stats, String) {
    let begin = Instant::now();
    let recording = recorder.start();
    let until_recording = begin.elapsed();
    let truth = target.run();
    let begin = Instant::now();
    let outcome = recording.stop();
    let last_profile = begin.elapsed();
    readable(&outcome.stderr);
    let (profile, stats) = outcome.results();
    assert_eq!((stats.exact_alloc_objects, stats.exact_alloc_bytes), (truth.allocs(), truth.bytes()), "{stats:?}");
    let in_use = profile.totals.inuse_bytes.as_ref().expect("frees are tracked");
    if stats.lost() == 0 {
        assert!(checks::close(in_use.value(), truth.live_bytes() as f64), "{in_use:?}, {}", truth.live_bytes());
    }
    assert!(target.end().success(), "the target came to harm");
    let cost = cost(&stats, until_recording, last_profile);
    (profile, stats, cost)
}

/// A hundred thousand executable mappings, a tenth of that in a short round.
#[test]
fn of_mappings() {
    let Some(_turn) = turn("flood_of_mappings") else { return };
    let count = if is_short() { 10_000 } else { 100_000 };
    let fault = format!("target with {count} executable mappings");
    // There is another mapping between any two of them.
    let Some(_raised) = Setting::raise(MAX_MAP_COUNT, 2 * count + 10_000) else {
        return not_run(&fault, "probe", "vm.max_map_count cannot be raised here");
    };
    for hook in [Hook::Probe, Hook::Inline] {
        if hook == Hook::Inline && !cfg!(target_arch = "x86_64") {
            continue;
        }
        let target = Target::start(&program("crowded"), ["code", &count.to_string(), "1000"]);
        let mapped =
            fs::read_to_string(format!("/proc/{}/maps", target.pid())).expect("it runs").lines().count() as u64;
        assert!(mapped > 2 * count, "{mapped}");
        let recorder = recorder(target.pid(), hook, 1);
        let (profile, stats, cost) = recorded_exactly(target, recorder);
        assert_eq!(stats.lost(), 0, "{stats:?}");
        let is_reported = profile.notes.iter().any(|note| note.contains("mappings"));
        seen(
            &fault,
            name_of(hook),
            1,
            &format!("totals exact{}; {cost}", if is_reported { ", what is not kept is told" } else { "" }),
        );
    }
}

/// A separate stack for each allocation: a million, an eighth of that in a short round.
#[test]
fn of_stacks() {
    let Some(_turn) = turn("flood_of_stacks") else { return };
    let levels = if is_short() { "17" } else { "20" };
    let target = Target::start(&program("many_stacks"), [levels, "40", "8"]);
    let recorder = Recorder::of(target.pid(), 1);
    let (profile, stats, cost) = recorded_exactly(target, recorder);
    let fault = format!("target with 2^{levels} stacks");
    let overflow = profile.stacks.iter().filter(|stack| stack.has("[other stacks]")).count();
    // Each allocation has its own stack, and each is counted somewhere: in its own row, in a shared row beyond the
    // limit, or, if its copy did not fit into its ring, in a row of few frames. None is missing, and the profile
    // reports the shared rows.
    let counter = |name: &str| profile.counters[name].as_u64().unwrap_or_else(|| panic!("{name} is counted"));
    let (without_copy, together) = (counter("stacks_lost"), stats.other["stacks_put_together"]);
    let shortened = counter("stacks_shortened");
    if stats.lost() == 0 {
        let samples: u64 = profile.stacks.iter().map(|stack| stack.samples).sum();
        assert_eq!(samples, stats.submitted, "samples of all rows");
        let of_their_own = profile.stacks.iter().filter(|stack| stack.samples == 1).count() as u64;
        assert!(
            of_their_own + without_copy + shortened + together >= stats.submitted,
            "{of_their_own}, {without_copy}, {shortened}, {together}"
        );
    }
    let is_reported = |what: &str| profile.notes.iter().any(|note| note.contains(what));
    assert!(without_copy == 0 || is_reported("have only their caller as a stack"), "{:?}", profile.notes);
    assert!(shortened == 0 || is_reported("have only the innermost part of their stack"), "{:?}", profile.notes);
    assert!(together == 0 || is_reported("[other stacks]"), "{:?}", profile.notes);
    let what = format!(
        "totals exact; {} stacks kept, {together} put together in {overflow} rows of other stacks, {without_copy} with their caller alone; {} samples \
         lost; {cost}",
        profile.stacks.len(),
        stats.lost()
    );
    seen(&fault, "probe", 1, &what);
}

/// Ten thousand short processes one after another, every second one with its own program. 500 in a short round.
#[test]
fn of_processes() {
    let Some(_turn) = turn("flood_of_processes") else { return };
    let count = if is_short() { "500" } else { "10000" };
    let target = Target::start(&program("brood"), ["short", count, "20"]);
    // Inline hooks may be too late for a child that replaces its program, which is reported then.
    let recorder = Recorder::of(target.pid(), 1).option("--hook", "probe");
    let (profile, stats, cost) = recorded_exactly(target, recorder);
    let fault = format!("target with {count} short children");
    let what = format!("totals exact; {} processes; {} samples lost; {cost}", profile.processes.len(), stats.lost());
    seen(&fault, "probe", 1, &what);
}

/// Threads that check their blocks, in the number that the row names.
#[test]
fn of_threads() {
    let Some(_turn) = turn("flood_of_threads") else { return };
    let threads = if is_short() { "1000" } else { "10000" };
    let mut target = Target::start(&program("enduring"), ["threads", threads]);
    let begin = Instant::now();
    let recording = recorder(target.pid(), Hook::Probe, 512).start();
    let until_recording = begin.elapsed();
    std::thread::sleep(Duration::from_secs(5));
    let worked = cpu_time(recording.pid());
    let begin = Instant::now();
    let outcome = recording.stop();
    let last_profile = begin.elapsed();
    readable(&outcome.stderr);
    let stats = accounted(&outcome);
    assert!(stats.hits > 0, "{stats:?}");
    target.go();
    assert!(target.line().starts_with("OK"), "the target came to harm");
    let what = format!(
        "{} calls, {} samples lost; {:.1} s of processor time in 5 s; {}",
        stats.hits,
        stats.lost(),
        worked.as_secs_f64(),
        cost(&stats, until_recording, last_profile)
    );
    seen(&format!("target with {threads} threads for 5 s"), "probe", 1, &what);
}
