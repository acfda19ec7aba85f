//! No loss goes unreported: hits = unsampled + submitted + failed + Σ lost, under conditions that cause losses.

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::turn;
use heapbpf_tests::output::Estimate;
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;

/// Checks that a figure's interval contains the figure and the truth.
fn covers(figure: &Estimate, truth: u64) {
    let (low, high) = (figure.low.expect("an interval"), figure.high.expect("an interval"));
    assert!(low <= truth as f64 && truth as f64 <= high, "{truth}: {figure:?}");
    assert!(low <= figure.value() && figure.value() <= high, "{figure:?}");
}

/// The daemon is stopped while the program runs: records that do not fit into one page of ring buffer must be counted.
#[test]
fn a_tiny_ring_loses_events_and_counts_each() {
    let Some(_turn) = turn("a_tiny_ring_loses_events_and_counts_each") else { return };
    let mut target = Target::start(&program("pairs"), ["20000", "4", "100"]);
    let recording = Recorder::of(target.pid(), 1).option("--ring-bytes", "4096").start();
    recording.signal(libc::SIGSTOP);
    let truth = target.run();
    recording.signal(libc::SIGCONT);
    let outcome = recording.stop();
    let (profile, stats) = outcome.results();
    assert!(stats.lost() > 19_000, "a page cannot hold them: {stats:?}");
    assert_eq!(stats.hits, truth.allocs());
    assert_eq!(stats.exact_alloc_bytes, truth.bytes(), "totals do not depend on the ring");
    // All blocks were freed. Lost frees are reconciled with the kernel's live map.
    assert_eq!(profile.totals.inuse_objects.as_ref().map(|e| e.value()), Some(0.0));
    covers(&profile.totals.alloc_bytes, truth.bytes());
    covers(&profile.totals.alloc_objects, truth.allocs());
    assert_eq!(profile.totals.alloc_bytes.value(), truth.bytes() as f64, "lost samples are in the total");
    assert_eq!(profile.totals.alloc_objects.value(), truth.allocs() as f64);
    assert!(outcome.stdout.contains("[records lost]"), "{}", outcome.stdout);
    let output = format!("{}\n{}", outcome.stdout, outcome.stderr).to_lowercase();
    assert!(output.contains("lost"), "the user is not told: {output}");
}

/// Blocks that do not fit into the live map still count as allocations. Their number is reported.
#[test]
fn a_tiny_live_map_is_a_counted_loss_of_in_use_only() {
    let Some(_turn) = turn("a_tiny_live_map_is_a_counted_loss_of_in_use_only") else { return };
    let mut target = Target::start(&program("healing"), ["1000", "900", "500"]);
    let recording = Recorder::of(target.pid(), 1).option("--live-max", "16").start();
    target.go();
    target.step();
    let truth = target.run();
    let outcome = recording.stop();
    let (profile, stats) = outcome.results();
    checks::sites(&profile, &truth, 1, Compare::Allocated);
    assert_eq!((stats.submitted, stats.lost()), (truth.allocs(), 0), "{stats:?}");
    let in_use = profile.totals.inuse_objects.as_ref().map_or(0.0, |e| e.value());
    assert!(in_use <= truth.live_allocs() as f64, "{in_use} in use, truth {}", truth.live_allocs());
    let figure = profile.totals.inuse_bytes.as_ref().expect("frees were followed");
    covers(figure, truth.live_bytes());
    assert!(figure.high > figure.low, "what is not tracked is not known: {figure:?}");
    let untracked = profile.counters.get("untracked").and_then(|n| n.as_u64()).unwrap_or_default();
    assert!(untracked >= 1000 - 128, "1,000 blocks, 16 places, {untracked} without one: {:?}", profile.counters);
}

/// Frees that did not fit into the ring are recovered by reconciliation with the kernel's live map.
#[test]
fn the_live_heap_heals_from_lost_frees() {
    let Some(_turn) = turn("the_live_heap_heals_from_lost_frees") else { return };
    let mut target = Target::start(&program("healing"), ["1500", "1200", "20000"]);
    let recording = Recorder::of(target.pid(), 1).option("--ring-bytes", "1MiB").start();
    // The first step's 1,500 records fit. Then the daemon stops reading. 20,000 pairs fill the ring, and none of the
    // 1,200 frees after them is reported (a few may fit where a record was too large).
    target.go();
    target.step();
    recording.signal(libc::SIGSTOP);
    let truth = target.run();
    recording.signal(libc::SIGCONT);
    let (profile, stats) = recording.stop().results();
    let lost_frees = profile.counters.get("frees_lost").and_then(|n| n.as_u64()).unwrap_or_default();
    assert!(lost_frees >= 1000, "nothing to reconcile: {:?}", profile.counters);
    assert_eq!(stats.hits, truth.allocs());
    let sums = checks::site_sums(&profile, None);
    assert_eq!(sums["site_00"].figures, [1_500_000.0, 1500.0, 300_000.0, 300.0]);
    assert_eq!(sums["site_01"].figures[3], 0.0, "the pairs are all freed");
}

#[test]
fn without_live_there_are_allocations_only() {
    let Some(_turn) = turn("without_live_there_are_allocations_only") else { return };
    for interval in [1, 4096] {
        let mut target = Target::start(&program("mix"), ["20000"]);
        let (profile, stats, truth) = Recorder::of(target.pid(), interval).flag("--no-live").results_of(&mut target);
        checks::sites(&profile, &truth, interval, Compare::Allocated);
        assert_eq!(stats.exact_alloc_bytes, truth.bytes());
        assert_eq!((stats.frees_seen, stats.frees_matched), (0, 0));
        assert!(stats.attach.iter().all(|probe| probe.function != "free"), "{:?}", stats.attach);
        let in_use = profile.totals.inuse_bytes.as_ref().and_then(|e| e.estimate);
        assert!(in_use.is_none_or(|n| n == 0.0), "in-use figures without frees: {in_use:?}");
    }
}

/// With more stacks than the limit, the coldest go to the overflow bucket `[other stacks]`. Sums stay exact, and the
/// profile says so.
#[test]
fn stacks_beyond_the_limit_go_to_the_overflow_bucket() {
    let Some(_turn) = turn("stacks_beyond_the_limit_go_to_the_overflow_bucket") else { return };
    const MOST: usize = 1000;
    let mut target = Target::start(&program("many_stacks"), ["15"]);
    let (outcome, truth) = Recorder::of(target.pid(), 1).option("--stacks-max", &MOST.to_string()).record(&mut target);
    let (profile, stats) = outcome.results();
    assert_eq!((stats.submitted, stats.lost()), (1 << 15, 0), "{stats:?}");
    assert!(profile.stacks.len() <= MOST, "{} stacks", profile.stacks.len());
    // A stack whose copy did not fit into its ring has only its caller, or its innermost frames. Such stacks are not
    // all distinct.
    let count = |name| profile.counters[name].as_u64().expect("a count");
    let incomplete = count("stacks_lost") + count("stacks_shortened");
    let overflowed = stats.other["stacks_put_together"];
    assert!(overflowed + incomplete > (1 << 15) - MOST as u64, "{overflowed} and {incomplete} incomplete");
    let others = profile.stacks.iter().filter(|stack| stack.has("[other stacks]"));
    assert!(others.clone().count() > 0 && overflowed > 0);
    let mut sums = [0.0; 4];
    for stack in &profile.stacks {
        let figures = &stack.figures;
        let in_use = |estimate: &Option<_>| estimate.as_ref().map_or(0.0, Estimate::value);
        let each = [
            figures.alloc_bytes.value(),
            figures.alloc_objects.value(),
            in_use(&figures.inuse_bytes),
            in_use(&figures.inuse_objects),
        ];
        sums.iter_mut().zip(each).for_each(|(sum, value)| *sum += value);
    }
    let (objects, live) = (truth.allocs() as f64, truth.live_allocs() as f64);
    assert_eq!(sums, [40.0 * objects, objects, 40.0 * live, live]);
    let is_reported = profile.notes.iter().any(|note| note.contains("[other stacks]"));
    assert!(is_reported && outcome.stdout.contains("[other stacks]"), "{:?}\n{}", profile.notes, outcome.stdout);
}
