//! Tests of the overhead controller: what it reduces, when, and what it reports.

use std::collections::BTreeMap;

use heapbpf_profile::model::Criterion;

use super::*;

const SECOND: u64 = 1_000_000_000;

fn controller(share: Option<f64>, automatic: bool) -> OverheadController {
    let measured = Measured {
        identity: String::new(),
        allocator: String::new(),
        allocation_kind: "emulated".into(),
        free_kind: "emulated".into(),
        bare_pair_ns: 8.0,
        costs: ProbeCosts { allocation_ns: 500.0, free_ns: 500.0, sample_ns: 3000.0 },
        inline_pair_ns: None,
        inline_is_bound: false,
        no_ops: None,
        nothing_ns: BTreeMap::new(),
    };
    let sampling = SamplingPlan {
        interval: 512 << 10,
        criterion: Criterion::Bytes,
        automatic,
        classes: None,
        live: true,
        mappings: false,
    };
    OverheadController::new(Some(measured), share, &sampling, SECOND)
}

fn counters(calls: u64) -> Counters {
    Counters { calls, unsampled: calls, unsampled_bytes: 100 * calls, frees_seen: calls, ..Counters::default() }
}

/// A target that makes a given number of pairs a second, and uses one CPU fully. `run` checks it for some seconds, and
/// returns the actions with their times, in tenths of seconds.
struct Load {
    controller: OverheadController,
    calls: u64,
    frees: u64,
    now_ns: u64,
}

impl Load {
    fn new(share: f64) -> Self {
        Self { controller: controller(Some(share), false), calls: 0, frees: 0, now_ns: SECOND }
    }

    /// Frees are counted only as long as they are tracked.
    fn run(&mut self, calls: u64, seconds: u64) -> Vec<(u64, Action)> {
        let (end_ns, mut done) = (self.now_ns + seconds * SECOND, Vec::new());
        while let Some(at_ns) = self.controller.next_ns().filter(|at_ns| *at_ns <= end_ns) {
            let made = calls * (at_ns - self.now_ns) / SECOND;
            self.now_ns = at_ns;
            self.calls += made;
            self.frees += if self.controller.tracking.frees { made } else { 0 };
            let counters = Counters { frees_seen: self.frees, ..counters(self.calls) };
            let actions = self.controller.look(&counters, (at_ns - SECOND) as f64 * 1e-9, false, at_ns);
            done.extend(actions.into_iter().map(|action| ((at_ns - SECOND) / 100_000_000, action)));
        }
        done
    }
}

#[test]
fn without_budget_nothing_is_looked_at_but_the_share_is_known() {
    let mut controller = controller(None, false);
    assert_eq!((controller.next_ns(), controller.share()), (None, None));
    // Pairs take 1.2 µs.
    controller.begin(3.0, SECOND);
    controller.watch(&counters(100_000), 4.0, 2 * SECOND);
    assert!((controller.share().unwrap() - 0.12).abs() < 1e-9, "{:?}", controller.share());
    controller.watch(&counters(100_000), 5.0, 3 * SECOND);
    assert_eq!(controller.share(), Some(0.0));
    assert!(controller.notes.is_empty());
}

#[test]
fn the_first_look_comes_early_and_quiet_targets_change_nothing() {
    let mut controller = controller(Some(0.25), false);
    assert_eq!(controller.next_ns(), Some(SECOND + FIRST_LOOK_NS));
    assert!(controller.look(&counters(1_000), 0.19, false, SECOND + FIRST_LOOK_NS).is_empty());
    assert_eq!(controller.next_ns(), Some(SECOND + FIRST_LOOK_NS + LOOK_NS));
    assert!(controller.share().unwrap() < 0.01 && controller.notes.is_empty());
}

/// Counters of targets with inline hooks: they count calls of 100 bytes without a sample themselves, and the kernel
/// sees samples of 1 MiB.
fn counted_inside(calls: u64, samples: u64) -> Counters {
    Counters {
        calls: calls + samples,
        unsampled: calls,
        unsampled_bytes: 100 * calls,
        sampled: samples,
        sampled_bytes: samples << 20,
        counted_inside: calls,
        inline_sampled: samples,
        ..Counters::default()
    }
}

/// As long as samples take little, the calls that targets count need not be read. What they were before does not
/// matter to the decision.
#[test]
fn what_targets_count_is_needed_once_their_samples_come_close_to_the_budget() {
    let mut controller = controller(Some(0.25), false);
    assert!(controller.needs_calls(SECOND), "nothing is known yet");
    let at_ns = |seconds: u64| (1 + seconds) * SECOND;
    // Each sample was freed, which is part of its cost.
    let in_kernel = |samples| Counters { frees_seen: samples, ..counted_inside(0, samples) };
    assert!(controller.look(&counted_inside(1_000_000, 0), 1.0, true, at_ns(1)).is_empty());
    assert!(!controller.needs_calls(at_ns(2)));
    assert!(controller.is_well_within(&in_kernel(200), 2.0, at_ns(2)) && !controller.needs_calls(at_ns(3)));
    assert_eq!(controller.next_ns(), Some(at_ns(3)));
    // 100,000 samples take 0.36 s of each second.
    assert!(!controller.is_well_within(&in_kernel(100_200), 3.0, at_ns(3)) && controller.needs_calls(at_ns(4)));
    assert!((controller.share().unwrap() - 0.36).abs() < 1e-3, "{:?}", controller.share());
    controller.look_from(&counted_inside(3_000_000, 100_200), 3.0, at_ns(3));
    assert!(controller.notes.is_empty(), "once is not enough");
    let actions = controller.look(&counted_inside(3_000_000, 200_200), 4.0, true, at_ns(4));
    assert!(matches!(actions[..], [Action::SetInterval(interval)] if interval > 512 << 10), "{actions:?}");
    assert!(controller.needs_calls(at_ns(5)));
    assert!(controller.look(&counted_inside(3_100_000, 200_300), 5.0, true, at_ns(5)).is_empty());
    assert!(!controller.needs_calls(at_ns(6)), "it was enough");
    // The last check of the kernel's counters alone was five seconds ago.
    assert!(controller.is_well_within(&in_kernel(200_400), 8.0, at_ns(8)));
    assert!(!controller.needs_calls(at_ns(64)) && controller.needs_calls(at_ns(66)), "not read for a minute");
}

#[test]
fn probes_and_an_automatic_interval_need_what_targets_count() {
    assert!(controller(None, true).needs_calls(SECOND));
    let mut controller = controller(Some(0.25), false);
    assert!(controller.look(&counters(1_000), 1.0, true, 2 * SECOND).is_empty());
    assert!(controller.needs_calls(3 * SECOND), "calls reached probes");
    assert!(controller.look(&counters(1_000), 2.0, true, 3 * SECOND).is_empty());
    assert!(!controller.needs_calls(4 * SECOND), "they do not any more");
}

/// Probes of pairs take 0.6 s of each second, those of allocations alone 0.3 s.
#[test]
fn a_hot_target_is_left_step_by_step_and_each_step_is_told() {
    let mut load = Load::new(0.05);
    assert_eq!(load.run(500_000, 60), [(12, Action::StopTrackingFrees), (32, Action::Detach)]);
    assert!(!load.controller.tracking.frees);
    assert_eq!((load.controller.next_ns(), load.controller.share()), (None, None), "there is nothing left to look at");
    let notes = load.controller.notes.join("\n");
    for part in [
        "more than the budget of 5",
        "--no-live would take 42.9 %",
        "after 1.2 s: frees are no longer tracked",
        "after 3.2 s: the probes were detached",
    ] {
        assert!(notes.contains(part), "{part}: {notes}");
    }
}

#[test]
fn what_is_enough_stays_and_nothing_comes_back() {
    let mut load = Load::new(0.4);
    assert_eq!(load.run(500_000, 60), [(12, Action::StopTrackingFrees)]);
    assert_eq!(load.run(1_000, 600), []);
    assert!(!load.controller.tracking.frees);
}

#[test]
fn a_short_burst_is_forgiven() {
    let mut load = Load::new(0.25);
    assert_eq!(load.run(0, 5), []);
    assert_eq!(load.run(700_000, 1), []);
    assert_eq!(load.run(1_000, 1), []);
    assert_eq!(load.run(700_000, 1), []);
    assert_eq!(load.run(0, 5), []);
    assert_eq!(load.run(700_000, 2).len(), 1);
}

#[test]
fn where_processes_are_hooked_one_by_one_nothing_is_given_up_for_all() {
    let mut controller = controller(Some(0.05), false);
    let inline = Counters { counted_inside: 1_000, inline_sampled: 10, ..counters(1_010) };
    let mut at = SECOND + FIRST_LOOK_NS;
    for second in 0..10 {
        let counted = Counters { calls: 1_010 + second * 500_000, unsampled: 1_010 + second * 500_000, ..inline };
        assert_eq!(controller.look(&counted, 0.2 + second as f64, true, at), []);
        at += LOOK_NS;
    }
}

#[test]
fn samples_of_an_interval_that_was_left_do_not_widen_the_next_one() {
    let mut controller = controller(Some(0.05), false);
    let mut seen = Vec::new();
    for second in 1..6_u64 {
        let sampled = 20_000 * second.min(2);
        let unsampled = 100_000 * second;
        let counted = Counters { calls: sampled + unsampled, sampled, ..counters(unsampled) };
        let at = SECOND + FIRST_LOOK_NS + second * LOOK_NS;
        let actions = controller.look(&counted, second as f64, false, at);
        seen.push(actions.iter().any(|action| matches!(action, Action::SetInterval(_))));
    }
    assert_eq!(seen, [false, true, false, false, false]);
}

#[test]
fn the_automatic_interval_is_set_at_the_first_look_and_then_kept() {
    let mut controller = controller(None, true);
    let at = SECOND + FIRST_LOOK_NS;
    assert_eq!(controller.look(&counters(100_000), 0.2, false, at), [Action::SetInterval(32_768)]);
    assert!(controller.look(&counters(200_000), 0.4, false, at + LOOK_NS).is_empty());
}

#[test]
fn calls_and_frees_of_targets_that_count_themselves_are_no_traps() {
    let inline = Counters {
        calls: 1_000_000,
        unsampled: 999_000,
        sampled: 1_000,
        submitted: 1_000,
        inline_sampled: 1_000,
        counted_inside: 999_000,
        frees_seen: 900,
        inline_frees: 900,
        ..Counters::default()
    };
    let probed = Counters { calls: 50, unsampled: 50, frees_seen: 40, ..Counters::default() };
    let mut both = inline;
    both.add(&probed);
    let used = usage(&both, 1.0, 1.0);
    assert_eq!((used.allocations, used.counted_inside, used.frees, used.samples), (50.0, 1e6, 40.0, 1_000.0));
}
