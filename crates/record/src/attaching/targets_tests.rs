//! Tests of which processes are targets, and of how completely each was counted.

use super::*;

#[test]
fn of_those_that_were_forked_too_early_the_counted_cpu_time_is_known() {
    let mut targets = TargetSet::default();
    (1..=4).for_each(|pid| targets.begin(pid, 100));
    targets.forked_late(1, Some(40));
    targets.forked_late(2, None);
    targets.forked_late(3, Some(30));
    assert_eq!(targets.share_if_late(1, || Some(100)), Some(0.6));
    assert_eq!(targets.share_if_late(4, || Some(100)), None, "links served it from its fork on");
    targets.used(1, 160);
    targets.used(1, 999);
    targets.used(2, 50);
    targets.used(4, 70);
    assert_eq!([1, 2, 3].map(|pid| targets.share_if_late(pid, || None)), [Some(0.75), Some(0.0), None]);
    let forks = LateForks { processes: 3, all_ns: 310, counted_ns: 190 };
    assert_eq!(targets.late_forks(|_| Some(100)), forks);
    targets.generation_began(3, 150);
    assert_eq!(targets.share_if_late(3, || Some(100)), None, "its next program was served");
    assert_eq!(targets.late_forks(|_| Some(100)), forks);
    targets.end(1, 200);
    targets.end(2, 200);
    targets.forget(300);
    assert_eq!(targets.late_forks(|_| Some(100)), forks, "the ended count although they are forgotten");
}

#[test]
fn children_for_which_links_are_being_made_are_counted_from_then_on() {
    let mut targets = TargetSet::default();
    for pid in [1, 2] {
        targets.begin(pid, 100);
        targets.forked_late(pid, None);
    }
    assert_eq!(targets.share_if_late(1, || Some(50)), Some(0.0));
    assert_eq!([1, 2].map(|pid| targets.seen(pid, 200).share), [0.0; 2]);
    targets.hooked(1, 100, 150);
    // Those of one file are there before those of another.
    targets.forked_late(1, Some(40));
    targets.forked_late(1, Some(30));
    targets.used(2, 20);
    targets.end(2, 180);
    targets.forked_late(2, Some(5));
    assert_eq!([1, 2].map(|pid| targets.seen(pid, 200).share), [0.5, 0.0], "the second ended before");
    assert_eq!([1, 2].map(|pid| targets.share_if_late(pid, || Some(100))), [Some(0.6), Some(0.0)]);
    let forks = LateForks { processes: 2, all_ns: 120, counted_ns: 60 };
    assert_eq!(targets.late_forks(|_| Some(100)), forks);
    targets.begin(3, 100);
    targets.forked_late(3, None);
    targets.generation_began(3, 150);
    assert_eq!((targets.seen_before(3, 150).share, targets.seen(3, 180).share), (0.0, 1.0), "its next program");
}

/// Growth is measured from the first reading, so there must be one of each process that lives for a while.
#[test]
fn the_memory_of_processes_that_begin_is_read_soon() {
    const SECOND: u64 = 1_000_000_000;
    let mut targets = TargetSet::default();
    let sums = Resident { files_bytes: 7, ..Resident::default() };
    targets.begin_running(1, SECOND, Some(&sums));
    for pid in 2..=5 {
        targets.begin(pid, SECOND);
    }
    targets.end(3, SECOND + 1);
    targets.generation_began(4, SECOND + 5);
    let first = |targets: &TargetSet| [1, 2, 3, 4, 5].map(|pid| targets.at_attach(pid).resident);
    let at = |at_ns, bytes| Some(ResidentAt { at_ns, bytes });
    let read = |pid: u32| (pid != 5).then_some(u64::from(pid) * 100);
    targets.read_first(2 * SECOND - 1, read);
    assert_eq!(first(&targets), [at(SECOND, 7), None, None, None, None], "it is too soon");
    targets.read_first(2 * SECOND, read);
    assert_eq!(first(&targets), [at(SECOND, 7), at(2 * SECOND, 200), None, None, None], "one has ended");
    targets.read_first(3 * SECOND, read);
    assert_eq!(first(&targets)[3], at(3 * SECOND, 400), "its next program");
    // Many are read in several steps.
    for pid in 100..100 + 2 * MOST_READ as u32 {
        targets.begin(pid, 3 * SECOND);
    }
    let known = |targets: &TargetSet| targets.coverages.values().filter(|it| it.first_resident.is_some()).count();
    for steps in 1..=2 {
        targets.read_first(5 * SECOND, read);
        assert_eq!(known(&targets), 3 + steps * MOST_READ);
    }
    for pid in 1000..1000 + 2 * MOST_UNREAD as u32 {
        targets.begin(pid, 5 * SECOND);
    }
    assert_eq!(targets.unread.len(), MOST_UNREAD);
}

#[test]
fn the_ended_are_forgotten_in_time() {
    let mut targets = TargetSet::default();
    targets.begin(1, 100);
    targets.begin(2, 100);
    assert!(targets.is_running(1) && !targets.is_running(3));
    targets.hooked(1, 100, 100);
    assert_eq!(targets.hooked_alive().collect::<Vec<_>>(), [1]);
    targets.end(1, 200);
    targets.end(1, 900);
    assert!(!targets.is_running(1) && targets.hooked_alive().next().is_none());
    assert!(targets.forget(200).is_empty());
    assert!(targets.coverages.contains_key(&1), "it may still be asked for");
    assert_eq!(targets.forget(201), [1]);
    assert_eq!(targets.coverages.keys().collect::<Vec<_>>(), [&2]);
}

#[test]
fn a_gap_that_reaches_into_the_next_generation_is_told_of_that() {
    let mut targets = TargetSet::default();
    // Its program was mapped at 110 and hooked at 300; the exec at 100 is reported later.
    targets.begin(1, 50);
    targets.hooked(1, 110, 300);
    targets.generation_began(1, 100);
    assert_eq!(targets.seen(1, 500).share, 1.0 - 190.0 / 400.0);
    assert_eq!(targets.seen_before(1, 100).share, 1.0);
    assert_eq!(targets.gaps_after_exec(), [(1, 190)]);
    // Hooked long before the exec: the next process generation has no gap.
    targets.begin(2, 50);
    targets.hooked(2, 60, 80);
    targets.generation_began(2, 100);
    assert_eq!((targets.seen(2, 500).share, targets.seen_before(2, 100).share), (1.0, 1.0 - 20.0 / 50.0));
    assert_eq!(targets.gaps_after_exec(), [(1, 190)]);
    // A gap that spans an exec is divided.
    targets.begin(3, 50);
    targets.hooked(3, 60, 200);
    targets.generation_began(3, 100);
    assert_eq!((targets.seen(3, 300).share, targets.seen_before(3, 100).share), (0.5, 1.0 - 40.0 / 50.0));
}

#[test]
fn a_program_that_ends_before_it_is_hooked_is_not_seen() {
    for hooks_each in [false, true] {
        let mut targets = TargetSet::new(hooks_each);
        targets.begin(1, 50);
        targets.hooked(1, 60, 60);
        targets.generation_began(1, 100);
        assert_eq!(targets.seen(1, 150).share, if hooks_each { 0.0 } else { 1.0 });
        assert_eq!(targets.seen_before(1, 100).share, 1.0);
        targets.hooked(1, 100, 120);
        assert_eq!(targets.seen(1, 200).share, 0.8);
    }
}

#[test]
fn coverage_is_the_share_of_time_that_was_hooked() {
    let mut coverage = Coverage { since_ns: 1000, ..Coverage::default() };
    assert_eq!(coverage.share(2000, None), 1.0);
    coverage.uncovered_ns = 250;
    assert_eq!(coverage.share(2000, None), 0.75);
    coverage.until_ns = Some(1500);
    assert_eq!(coverage.share(9000, None), 0.5);
    assert_eq!([1250, 1500, 3000].map(|at_ns| coverage.share(9000, Some(at_ns))), [0.0, 0.5, 0.5], "detached");
    coverage.uncovered_ns = 9999;
    assert_eq!(coverage.share(9000, None), 0.0);
    assert_eq!(Coverage::default().share(0, None), 1.0);
}

#[test]
fn a_process_whose_hooks_were_taken_out_is_covered_up_to_then() {
    let mut targets = TargetSet::default();
    targets.begin(1, 1000);
    targets.begin(2, 1000);
    targets.give_up(1, 1250);
    targets.give_up(3, 1250);
    assert!(targets.is_given_up(1) && !targets.is_given_up(2) && !targets.is_given_up(3));
    assert_eq!((targets.seen(1, 2000).share, targets.seen(2, 2000).share), (0.25, 1.0));
    // It was forked after that.
    targets.begin(4, 1500);
    targets.give_up(4, 1250);
    assert_eq!(targets.seen(4, 2000).share, 0.0);
    targets.generation_began(1, 2000);
    assert!(!targets.is_given_up(1), "it runs another program");
    assert_eq!((targets.seen_before(1, 2000).share, targets.seen(1, 3000).share), (0.25, 1.0));
}

#[test]
fn a_process_that_was_let_go_is_covered_up_to_then_and_from_its_next_hooks_on() {
    let mut targets = TargetSet::new(true);
    targets.begin(1, 1000);
    targets.hooked(1, 1000, 1250);
    targets.let_go(1, 1500);
    assert!(targets.is_given_up(1) && targets.some_given_up);
    assert_eq!((targets.seen(1, 2000).share, targets.seen_again_ns(1)), (0.25, None));
    targets.hooked(1, 1000, 1750);
    assert!(!targets.is_given_up(1) && std::mem::take(&mut targets.some_again));
    assert_eq!((targets.seen(1, 2000).share, targets.seen_again_ns(1)), (0.5, Some(1750)));
    targets.generation_began(1, 2000);
    assert_eq!(targets.seen_again_ns(1), None, "it runs another program");
}

#[test]
fn a_process_is_seen_again_when_others_hooks_are_gone() {
    let mut targets = TargetSet::default();
    targets.begin(1, 1000);
    targets.begin(2, 1000);
    assert!(!targets.some_hidden && targets.seen(1, 2000) == ObservedShare::WHOLE);
    // It had them before the recording began.
    targets.hidden_since(1, 500);
    targets.hidden_since(1, 1900);
    assert!(targets.some_hidden && targets.is_hidden(1) && !targets.is_hidden(2));
    assert_eq!(targets.seen(1, 2000), ObservedShare { share: 0.0, was_hidden: true });
    assert!(targets.seen_again(1, 1500) && !targets.seen_again(1, 1600) && !targets.seen_again(2, 1600));
    assert_eq!((targets.is_hidden(1), targets.seen_again_ns(1)), (false, Some(1500)));
    assert_eq!(targets.seen(1, 2000), ObservedShare { share: 0.5, was_hidden: true });
    // The same time does not count twice.
    targets.hidden_since(1, 1400);
    assert!(targets.seen_again(1, 1750));
    assert_eq!(targets.seen(1, 2000).share, 0.25);
    // The process's end ends it; anything later belongs to another process with this id.
    targets.hidden_since(1, 1800);
    targets.end(1, 2000);
    targets.hidden_since(1, 2100);
    assert!(!targets.seen_again(1, 2200) && targets.seen(1, 9000).share < 0.06);
    // Another program has no such hooks, and is seen.
    targets.hidden_since(2, 1500);
    targets.generation_began(2, 2000);
    assert_eq!(targets.seen_before(2, 2000), ObservedShare { share: 0.5, was_hidden: true });
    assert!(targets.seen(2, 3000) == ObservedShare::WHOLE && !targets.is_hidden(2));
}
