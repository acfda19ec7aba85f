//! The cost of inline hooks, and a sampling interval that changes while they count.

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::turn;
use heapbpf_tests::inline::{counted_exactly, is_hooked, limit_addresses};
use heapbpf_tests::output::{Estimate, Profile, Stats};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::{Target, until};
use heapbpf_tests::truth::{Law, Truth};

/// Records `mix` making this many allocations, hooked inline.
fn record(times: &str, options: &[(&str, &str)]) -> (Profile, Stats, Truth) {
    let mut target = Target::start(&program("mix"), [times]);
    let recorder = Recorder::new().pid(target.pid()).option("--hook", "inline").flag("--no-follow").flag("-v");
    let recorder = options.iter().fold(recorder, |recorder, (option, value)| recorder.option(option, value));
    let recording = recorder.start();
    assert!(is_hooked(target.pid()), "{}", recording.said());
    let truth = target.run();
    let (profile, stats) = recording.stop().results();
    (profile, stats, truth)
}

/// Checks an estimate against its own interval. A false alarm has a probability of 1 in 1.7 million.
fn is_true(estimate: &Estimate, truth: u64) {
    let (Some(low), Some(high)) = (estimate.low, estimate.high) else { panic!("no interval: {estimate:?}") };
    let sigma = (high - low) / (2.0 * 1.96);
    let off = (estimate.value() - truth as f64).abs();
    assert!(off <= 5.0 * sigma, "{estimate:?} instead of {truth}");
}

/// Checks memory allocated and in use, estimated from samples at several intervals.
fn figures_are_true(profile: &Profile, truth: &Truth) {
    let intervals: std::collections::BTreeSet<u64> = profile.stacks.iter().map(|stack| stack.interval).collect();
    println!("intervals {intervals:?}\n{}", profile.notes.join("\n"));
    is_true(&profile.totals.alloc_bytes, truth.bytes());
    is_true(profile.totals.inuse_bytes.as_ref().expect("frees are tracked"), truth.live_bytes());
    // Object counts of mixed sizes have no interval of their own. That of the widest interval is an upper bound.
    let widest = intervals.last().copied().expect("samples");
    let rows = truth.sites.iter().flat_map(|site| &site.sizes);
    let allocated = Law::of(rows.clone().map(|row| (row[0], row[1])), widest).objects;
    let live = Law::of(rows.map(|row| (row[0], row[2])), widest).objects;
    let inuse = profile.totals.inuse_objects.as_ref().expect("frees are tracked");
    for (law, estimate) in [(allocated, &profile.totals.alloc_objects), (live, inuse)] {
        assert!((estimate.value() - law.truth).abs() <= law.tolerance(), "{estimate:?} instead of {}", law.truth);
    }
    assert!(checks::z(&profile.totals.alloc_bytes).abs() < 5.0);
}

/// A trap takes more than 100 ns on any machine, and no call of this program costs a tenth of that.
#[test]
fn calls_that_the_target_counts_are_no_probe_time() {
    let Some(_turn) = turn("inline_calls_that_the_target_counts_are_no_probe_time") else { return };
    let (profile, stats, truth) = record("400000", &[("-i", "524288"), ("--max-overhead", "25%")]);
    counted_exactly(&stats, &truth);
    let seconds = stats.probe_seconds.expect("what probes cost is known");
    println!("{seconds} s in probes for {} calls, {} samples", stats.hits, stats.submitted);
    assert!(seconds < 50e-9 * stats.hits as f64, "{seconds} s for {} calls", stats.hits);
    assert!(!profile.notes.iter().any(|note| note.contains("probes t")), "{:?}", profile.notes);
}

#[test]
fn an_interval_that_is_too_dear_is_widened_while_the_target_runs() {
    let Some(_turn) = turn("inline_an_interval_that_is_too_dear_is_widened") else { return };
    let (profile, stats, truth) = record("2000000", &[("-i", "1"), ("--max-overhead", "5%")]);
    counted_exactly(&stats, &truth);
    assert!(stats.unsampled > 0, "{stats:?}");
    assert!(profile.stacks.iter().any(|stack| stack.interval == 1), "it began with every call");
    assert!(profile.stacks.iter().any(|stack| stack.interval > 1));
    figures_are_true(&profile, &truth);
}

/// A process that cannot be hooked inline has its own links until they exceed the budget. Other processes are still
/// counted.
#[test]
fn a_process_whose_own_links_are_too_dear_is_given_up_alone() {
    let Some(_turn) = turn("a_process_whose_own_links_are_too_dear_is_given_up_alone") else { return };
    const INTERVAL: u64 = 4096;
    let mut dear = Target::start(&program("churn"), ["pairs", "1000000000"]);
    limit_addresses(dear.pid(), 1536 << 10);
    let mut other = Target::start(&program("mix"), ["20000"]);
    let recorder = Recorder::new().pid(dear.pid()).pid(other.pid()).option("--max-overhead", "25%").interval(INTERVAL);
    let recording = recorder.start();
    assert!(is_hooked(other.pid()) && !is_hooked(dear.pid()), "{}", recording.said());
    dear.go();
    until("that it is given up", || recording.next_line().contains("it is not counted any more"));
    let truth = other.run();
    let (profile, _) = recording.stop().results();
    checks::sites_of(&profile, other.pid(), &truth, INTERVAL, Compare::All);
    let process = profile.process(dear.pid());
    assert!(process.figures.alloc_objects.value() > 0.0 && process.coverage < 1.0, "{process:?}");
    assert!(
        process.figures.inuse_bytes.as_ref().is_none_or(|inuse| inuse.estimate.is_none()),
        "its frees are not seen"
    );
    assert!(process.cpu_coverage.is_some_and(|share| share > 0.0 && share < 1.0), "{process:?}");
    assert_eq!(profile.process(other.pid()).coverage, 1.0);
    let reported = profile.notes.iter().filter(|note| note.contains("it is not counted any more")).count();
    assert_eq!(reported, 1, "{:?}", profile.notes);
}
