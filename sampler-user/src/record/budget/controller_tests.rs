//! Tests of the overhead controller: what it reduces, when, and what it reports.

use super::*;
use heapbpf_profile::model::Criterion;
use std::collections::BTreeMap;

const SECOND: u64 = 1_000_000_000;

fn controller(share: Option<f64>, automatic: bool, is_default: bool) -> OverheadController {
    let measured = Measured {
        identity: String::new(),
        allocator: String::new(),
        allocation_kind: "emulated".into(),
        free_kind: "emulated".into(),
        bare_pair_ns: 8.0,
        costs: ProbeCosts { allocation_ns: 500.0, free_ns: 500.0, sample_ns: 3000.0 },
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
    OverheadController::new(Some(measured), BudgetPlan { share, is_default }, &sampling, SECOND)
}

fn counters(calls: u64) -> Counters {
    Counters { calls, unsampled: calls, unsampled_bytes: 100 * calls, frees_seen: calls, ..Counters::default() }
}

#[test]
fn without_budget_nothing_is_looked_at_but_probe_time_is_told() {
    let controller = controller(None, false, false);
    assert_eq!(controller.next_ns(), None);
    // These calls cost one second in a loop.
    assert!((controller.probe_seconds(&counters(1_000_000)).unwrap() - 1.2).abs() < 1e-9);
    assert!(controller.notes(2 * SECOND).is_empty());
}

#[test]
fn the_first_look_comes_early_and_quiet_targets_change_nothing() {
    let mut controller = controller(Some(0.25), false, false);
    assert_eq!(controller.next_ns(), Some(SECOND + FIRST_LOOK_NS));
    assert!(controller.look(&counters(1_000), 0.19, SECOND + FIRST_LOOK_NS, Vec::new).is_empty());
    assert_eq!(controller.next_ns(), Some(SECOND + FIRST_LOOK_NS + LOOK_NS));
    assert!(controller.share().unwrap() < 0.01 && controller.notes(2 * SECOND).is_empty());
}

#[test]
fn a_hot_target_is_left_step_by_step_and_each_step_is_told() {
    let mut controller = controller(Some(0.05), false, false);
    let at = SECOND + FIRST_LOOK_NS;
    // 100,000 pairs take 120 ms of 200 ms.
    assert_eq!(controller.look(&counters(100_000), 0.2, at, Vec::new), [Action::Detach, Action::StopTrackingFrees]);
    assert!(controller.stopped_tracking_frees(true));
    let next = controller.next_ns().unwrap();
    assert!(next > at + WINDOW_NS, "{next}");
    assert_eq!(controller.look(&counters(100_000), 1.0, next, Vec::new), [Action::Attach]);
    assert_eq!(controller.next_ns(), Some(next + WINDOW_NS));
    assert!(controller.time_share(next) < 0.5);
    let notes = controller.notes(next).join("\n");
    for part in [
        "more than the budget of 5",
        "--no-live would take 42.9 %",
        "frees are not followed",
        "time windows",
        "of the time",
    ] {
        assert!(notes.contains(part), "{part}: {notes}");
    }
}

#[test]
fn frees_go_group_by_group_where_that_is_enough() {
    let mut controller = controller(Some(0.05), false, false);
    let group = |pid: u32, frees: u64, inuse_bytes: f64| FreeGroup {
        name: format!("p ({pid})"),
        links: vec![Served::Process(pid)],
        frees: frees as f64,
        inuse_bytes,
    };
    let counted = |frees: u64| Counters { calls: 1_000, unsampled: 1_000, frees_seen: frees, ..Counters::default() };
    let at = SECOND + FIRST_LOOK_NS;
    // 100,000 frees take 60 ms of 200 ms, all but 1,000 of them in one process.
    let groups = || vec![group(7, 1_000, 5e6), group(8, 99_000, 6e6)];
    let actions = controller.look(&counted(100_000), 0.2, at, groups);
    assert_eq!(actions, [Action::StopTrackingFreesOf(vec![Served::Process(8)])]);
    assert!(controller.may_stop_tracking_frees() && !controller.stopped_tracking_frees(true));
    let notes = controller.notes(at).join("\n");
    for part in ["after 0.2 s: frees of p (8)", "5.72 MiB known in use for 99,000 calls", "budget of 5"] {
        assert!(notes.contains(part), "{part}: {notes}");
    }
    // The remaining frees are within the budget, until there are more of them.
    let at = at + LOOK_NS;
    assert!(controller.look(&counted(105_000), 1.2, at, || panic!("nothing is to be given up")).is_empty());
    let actions = controller.look(&counted(205_000), 1.5, at + LOOK_NS, || vec![group(7, 100_000, 5e6)]);
    assert_eq!(actions, [Action::StopTrackingFrees]);
    assert!(!controller.may_stop_tracking_frees() && controller.stopped_tracking_frees(true));
}

#[test]
fn samples_of_an_interval_that_was_left_do_not_widen_the_next_one() {
    let mut controller = controller(Some(0.05), false, false);
    let mut counted = Counters { calls: 120_000, sampled: 20_000, ..counters(100_000) };
    let mut at = SECOND + FIRST_LOOK_NS;
    let widened = |actions: Vec<Action>| actions.iter().any(|action| matches!(action, Action::SetInterval(_)));
    assert!(widened(controller.look(&counted, 0.2, at, Vec::new)));
    for window in 1..5 {
        at = controller.next_ns().unwrap();
        assert_eq!(controller.look(&counted, f64::from(window), at, Vec::new), [Action::Attach]);
        at = controller.next_ns().unwrap();
        let unsampled = 100_000 + 50_000 * window as u64;
        counted = Counters { calls: 20_000 + unsampled, sampled: 20_000, ..counters(unsampled) };
        assert!(!widened(controller.look(&counted, f64::from(window) + 0.1, at, Vec::new)), "window {window}");
    }
}

#[test]
fn a_short_burst_is_forgiven_where_nobody_asked_for_a_budget() {
    let mut controller = controller(Some(0.25), false, true);
    let at = SECOND + FIRST_LOOK_NS;
    assert!(controller.look(&counters(150_000), 0.2, at, Vec::new).is_empty());
    assert!(controller.look(&counters(151_000), 1.2, at + LOOK_NS, Vec::new).is_empty());
    assert!(controller.look(&counters(851_000), 2.2, at + 2 * LOOK_NS, Vec::new).is_empty());
    assert!(!controller.look(&counters(1_551_000), 3.2, at + 3 * LOOK_NS, Vec::new).is_empty());
}

#[test]
fn what_cannot_be_held_ends_at_once() {
    let mut controller = controller(Some(0.0005), false, false);
    let actions = controller.look(&counters(190_000), 0.2, SECOND + FIRST_LOOK_NS, Vec::new);
    assert_eq!(actions.first(), Some(&Action::Detach));
    assert_eq!(controller.next_ns(), None);
}

#[test]
fn the_automatic_interval_is_set_at_the_first_look_and_then_kept() {
    let mut controller = controller(None, true, false);
    let at = SECOND + FIRST_LOOK_NS;
    assert_eq!(controller.look(&counters(100_000), 0.2, at, Vec::new), [Action::SetInterval(32_768)]);
    assert!(controller.look(&counters(200_000), 0.4, at + LOOK_NS, Vec::new).is_empty());
}
