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
        inline_pair_ns: None,
        inline_is_bound: false,
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

fn none(_: Which) -> Vec<FreeGroup<Served>> {
    Vec::new()
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
    assert!(controller.look(&counters(1_000), 0.19, SECOND + FIRST_LOOK_NS, none).is_empty());
    assert_eq!(controller.next_ns(), Some(SECOND + FIRST_LOOK_NS + LOOK_NS));
    assert!(controller.share().unwrap() < 0.01 && controller.notes(2 * SECOND).is_empty());
}

#[test]
fn a_hot_target_is_left_step_by_step_and_each_step_is_told() {
    let mut controller = controller(Some(0.05), false, false);
    let at = SECOND + FIRST_LOOK_NS;
    // 100,000 pairs take 120 ms of 200 ms.
    assert_eq!(controller.look(&counters(100_000), 0.2, at, none), [Action::Detach, Action::StopTrackingFrees]);
    assert!(controller.stopped_tracking_frees(true));
    let next = controller.next_ns().unwrap();
    assert!(next > at + WINDOW_NS, "{next}");
    assert_eq!(controller.look(&counters(100_000), 1.0, next, none), [Action::Attach]);
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
    let groups = |_| vec![group(7, 1_000, 5e6), group(8, 99_000, 6e6)];
    let actions = controller.look(&counted(100_000), 0.2, at, groups);
    assert_eq!(actions, [Action::StopTrackingFreesOf(vec![Served::Process(8)])]);
    assert!(!controller.stopped_tracking_frees(true));
    let notes = controller.notes(at).join("\n");
    for part in ["after 0.2 s: frees of p (8)", "5.72 MiB known in use for 99,000 calls", "budget of 5"] {
        assert!(notes.contains(part), "{part}: {notes}");
    }
    // The remaining frees are within the budget, until there are more of them.
    let at = at + LOOK_NS;
    assert!(controller.look(&counted(105_000), 1.2, at, |_| panic!("nothing is to be given up")).is_empty());
    let actions = controller.look(&counted(205_000), 1.5, at + LOOK_NS, |_| vec![group(7, 100_000, 5e6)]);
    assert_eq!(actions, [Action::StopTrackingFrees]);
    assert!(controller.stopped_tracking_frees(true));
}

/// A hot target and a calm one: 600,000 pairs a second while it is hot, and 1,000 later.
struct Load {
    calls: u64,
    frees: u64,
    cpu_seconds: f64,
    now_ns: u64,
}

impl Load {
    /// Goes on to the next look, with so many calls a second. Frees are counted only if they are tracked.
    fn next(&mut self, controller: &OverheadController, calls: u64) -> (Counters, f64, u64) {
        let now_ns = controller.next_ns().expect("a look");
        let seconds = (now_ns - self.now_ns) as f64 * 1e-9;
        self.now_ns = now_ns;
        self.calls += (calls as f64 * seconds) as u64;
        self.frees += if controller.stopped_tracking_frees(true) { 0 } else { (calls as f64 * seconds) as u64 };
        self.cpu_seconds += seconds;
        let counters = Counters {
            calls: self.calls,
            unsampled: self.calls,
            unsampled_bytes: 100 * self.calls,
            frees_seen: self.frees,
            ..Counters::default()
        };
        (counters, self.cpu_seconds, now_ns)
    }
}

/// Looks until an action is due, for `seconds` at the most.
fn until_action(controller: &mut OverheadController, load: &mut Load, calls: u64, seconds: u64) -> Vec<Action> {
    let end_ns = load.now_ns + seconds * SECOND;
    while load.now_ns < end_ns {
        let (counters, cpu_seconds, now_ns) = load.next(controller, calls);
        let actions = controller.look(&counters, cpu_seconds, now_ns, none);
        if !actions.is_empty() {
            return actions;
        }
    }
    Vec::new()
}

#[test]
fn frees_are_tracked_again_when_load_falls_and_pauses_grow_if_it_comes_back() {
    let mut controller = controller(Some(0.30), false, false);
    let mut load = Load { calls: 0, frees: 0, cpu_seconds: 0.0, now_ns: SECOND };
    let again = [Action::TrackFreesAgain { except: Vec::new() }];
    for wait in [10, 20, 40] {
        // Pairs take 0.36 s of a second, allocations alone 0.18 s: too much for frees to come back.
        assert_eq!(until_action(&mut controller, &mut load, 300_000, 3), [Action::StopTrackingFrees]);
        assert!(controller.stopped_tracking_frees(true) && controller.chooses_whose_frees());
        assert_eq!(until_action(&mut controller, &mut load, 300_000, 200), []);
        assert_eq!(until_action(&mut controller, &mut load, 1_000, wait), [], "{wait}");
        assert_eq!(until_action(&mut controller, &mut load, 1_000, 3), again, "{wait}");
        assert!(!controller.notes(load.now_ns).iter().any(|note| note.contains("followed again")) || wait > 10);
        controller.frees_were_taken_up(false, load.now_ns);
        assert!(!controller.stopped_tracking_frees(true));
    }
    let notes = controller.notes(load.now_ns).join("\n");
    assert!(notes.contains("load has fallen: frees are followed again"), "{notes}");
    // Quiet targets are calm, too.
    assert_eq!(until_action(&mut controller, &mut load, 300_000, 3), [Action::StopTrackingFrees]);
    assert_eq!(until_action(&mut controller, &mut load, 1, 90), again);
}

#[test]
fn what_the_user_did_not_ask_for_does_not_come_back() {
    let mut controller = controller(Some(0.30), false, false);
    (controller.live, controller.tracking.frees) = (false, false);
    let mut load = Load { calls: 0, frees: 0, cpu_seconds: 0.0, now_ns: SECOND };
    assert_eq!(until_action(&mut controller, &mut load, 1_000, 100), []);
}

#[test]
fn groups_come_back_as_far_as_there_is_room() {
    let mut controller = controller(Some(0.30), false, false);
    let mut load = Load { calls: 0, frees: 0, cpu_seconds: 0.0, now_ns: SECOND };
    let group = |pid: u32, frees: f64| FreeGroup {
        name: format!("p ({pid})"),
        links: vec![Served::Process(pid)],
        frees,
        inuse_bytes: 0.0,
    };
    let (counters, cpu_seconds, now_ns) = load.next(&controller, 300_000);
    let stopped = controller.look(&counters, cpu_seconds, now_ns, |which| {
        assert_eq!(which, Which::Tracked);
        vec![group(7, 59_000.0), group(8, 1_000.0)]
    });
    assert_eq!(stopped, [Action::StopTrackingFreesOf(vec![Served::Process(7)])]);
    // 160,000 allocations a second take 96 ms; as many frees would be too much, half as many would not.
    let mut frees = load.frees;
    let actions = loop {
        let (counters, cpu_seconds, now_ns) = load.next(&controller, 160_000);
        frees += 100;
        let counters = Counters { frees_seen: frees, ..counters };
        let actions = controller.look(&counters, cpu_seconds, now_ns, |which| {
            assert_eq!(which, Which::GivenUp);
            vec![group(7, 150_000.0), group(9, 9_000.0)]
        });
        if !actions.is_empty() {
            break actions;
        }
        assert!(load.now_ns < 20 * SECOND, "it never comes back");
    };
    assert_eq!(actions, [Action::TrackFreesAgain { except: vec![Served::Process(7)] }]);
    controller.frees_were_taken_up(true, load.now_ns);
    assert!(controller.notes(load.now_ns).join("\n").contains("frees of p (9) are followed again"));
}

#[test]
fn samples_of_an_interval_that_was_left_do_not_widen_the_next_one() {
    let mut controller = controller(Some(0.05), false, false);
    let mut counted = Counters { calls: 120_000, sampled: 20_000, ..counters(100_000) };
    let mut at = SECOND + FIRST_LOOK_NS;
    let widened = |actions: Vec<Action>| actions.iter().any(|action| matches!(action, Action::SetInterval(_)));
    assert!(widened(controller.look(&counted, 0.2, at, none)));
    for window in 1..5 {
        at = controller.next_ns().unwrap();
        assert_eq!(controller.look(&counted, f64::from(window), at, none), [Action::Attach]);
        at = controller.next_ns().unwrap();
        let unsampled = 100_000 + 50_000 * window as u64;
        counted = Counters { calls: 20_000 + unsampled, sampled: 20_000, ..counters(unsampled) };
        assert!(!widened(controller.look(&counted, f64::from(window) + 0.1, at, none)), "window {window}");
    }
}

#[test]
fn a_short_burst_is_forgiven_where_nobody_asked_for_a_budget() {
    let mut controller = controller(Some(0.25), false, true);
    let at = SECOND + FIRST_LOOK_NS;
    assert!(controller.look(&counters(150_000), 0.2, at, none).is_empty());
    assert!(controller.look(&counters(151_000), 1.2, at + LOOK_NS, none).is_empty());
    assert!(controller.look(&counters(851_000), 2.2, at + 2 * LOOK_NS, none).is_empty());
    assert!(!controller.look(&counters(1_551_000), 3.2, at + 3 * LOOK_NS, none).is_empty());
}

#[test]
fn what_cannot_be_held_ends_at_once_and_is_tried_again_after_growing_waits() {
    let mut controller = controller(Some(0.0005), false, false);
    let mut load = Load { calls: 0, frees: 0, cpu_seconds: 0.0, now_ns: SECOND };
    let (counters, cpu_seconds, now_ns) = load.next(&controller, 900_000);
    let actions = controller.look(&counters, cpu_seconds, now_ns, none);
    assert_eq!(actions, [Action::Detach, Action::StopTrackingFrees]);
    for wait in [60, 120, 240, 480, 600, 600] {
        assert_eq!(controller.next_ns(), Some(load.now_ns + wait * SECOND));
        let (counters, cpu_seconds, now_ns) = load.next(&controller, 0);
        assert_eq!(controller.look(&counters, cpu_seconds, now_ns, none), [Action::Attach]);
        let (counters, cpu_seconds, now_ns) = load.next(&controller, 900_000);
        assert_eq!(controller.look(&counters, cpu_seconds, now_ns, none), [Action::Detach], "{wait}");
    }
    let notes = controller.notes(load.now_ns);
    assert_eq!(notes.iter().filter(|note| note.contains("were taken away")).count(), 1, "{notes:?}");
    // Once it rests, probes stay, and then frees come back.
    assert_eq!(until_action(&mut controller, &mut load, 0, 601), [Action::Attach]);
    assert_eq!(until_action(&mut controller, &mut load, 1, 20), [Action::TrackFreesAgain { except: Vec::new() }]);
    assert!(!controller.has_windows());
}

#[test]
fn the_automatic_interval_is_set_at_the_first_look_and_then_kept() {
    let mut controller = controller(None, true, false);
    let at = SECOND + FIRST_LOOK_NS;
    assert_eq!(controller.look(&counters(100_000), 0.2, at, none), [Action::SetInterval(32_768)]);
    assert!(controller.look(&counters(200_000), 0.4, at + LOOK_NS, none).is_empty());
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
