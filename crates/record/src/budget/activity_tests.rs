//! Tests of which processes are hooked next, and of how much of their CPU time was counted.

use super::*;

const MS: u64 = 1_000_000;

fn process(tgid: u32) -> ProcessKey {
    ProcessKey { tgid, ..ProcessKey::default() }
}

/// A thread that has used this much CPU time.
fn living(process: ProcessKey, cpu_ns: u64) -> LivingThread {
    LivingThread { process, memory_users: 1, cpu_ns, ..LivingThread::default() }
}

/// Checks processes with this much CPU time, ms. Returns those that are due.
fn look(activity: &mut Activity, cpu_ms: &[(u32, u64)], now_ms: u64) -> Vec<u32> {
    let thread = |(tgid, ms): &(u32, u64)| living(process(*tgid), ms * MS);
    activity.look(&cpu_ms.iter().map(thread).collect::<Vec<_>>(), now_ms * MS, |_| false, |process| process.tgid != 9);
    activity.due(now_ms * MS).into_iter().map(|process| process.tgid).collect()
}

#[test]
fn checks_that_take_long_are_rarer() {
    let mut activity = Activity::new(2, 0, false);
    look(&mut activity, &[(1, 5)], 1_000);
    // One percent of a processor.
    let mut next_ms = |ns| {
        activity.check_took(ns);
        activity.next_ns() / MS
    };
    assert_eq!([next_ms(MS / 2), next_ms(3 * MS), next_ms(u64::MAX)], [1_100, 1_300, 2_600]);
}

#[test]
fn what_a_program_used_before_it_was_hooked_is_not_counted_and_is_taken_off_once() {
    let process = ProcessKey { tgid: 1, start_ns: 5, ..ProcessKey::default() };
    let thread = |ms| [living(process, ms * MS)];
    // A check may or may not find it before it is hooked, and before it ends.
    for (is_found_before, is_found_after) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut activity = Activity::new(2, 1, true);
        activity.look(&[], 100 * MS, |_| false, |_| true);
        if is_found_before {
            activity.look(&thread(2), 200 * MS, |_| false, |_| true);
        }
        activity.counted_late(process, 3 * MS, Some(3 * MS));
        if is_found_after {
            activity.look(&thread(8), 300 * MS, |_| true, |_| true);
        }
        activity.look(&[], 400 * MS, |_| false, |_| true);
        let ended = Progress { ended_counted_ns: 10 * MS, ended_uncounted_ns: 2 * MS, ..Progress::default() };
        let expected = CpuTime { all_ns: 12 * MS, counted_ns: 7 * MS };
        assert_eq!(activity.of_all(&ended, |_| true), expected, "{is_found_before} {is_found_after}");
    }
}

/// One process began before the recording, and one in it. The second is not known yet when it loads an allocator.
#[test]
fn what_a_process_used_before_a_loaded_allocator_was_hooked_is_not_counted() {
    let mut activity = Activity::new(2, 1, true);
    let [old, new] = [0, 5].map(|start_ns| ProcessKey { tgid: 1, start_ns, exec_id: 0 });
    look_counted(&mut activity, &[(old, 1000)], 100, |_| true);
    activity.lacked(old, 20 * MS);
    activity.lacked(new, 30 * MS);
    look_counted(&mut activity, &[(old, 1100), (new, 40)], 200, |_| true);
    assert_eq!(activity.of(old), Some(CpuTime { all_ns: 100 * MS, counted_ns: 80 * MS }));
    assert_eq!(activity.of(new), Some(CpuTime { all_ns: 40 * MS, counted_ns: 10 * MS }));
    // The BPF programs add up what began in the recording as counted.
    look_at(&mut activity, &[], 300);
    let ended = Progress { ended_counted_ns: 40 * MS, ..Progress::default() };
    assert_eq!(activity.of_all(&ended, |_| true), CpuTime { all_ns: 140 * MS, counted_ns: 90 * MS });
}

#[test]
fn the_busiest_come_first_and_idle_ones_never() {
    let mut activity = Activity::new(2, 1, false);
    assert!(look(&mut activity, &[(1, 9000), (2, 0), (3, 5)], 100).is_empty(), "what was before says nothing");
    assert_eq!(look(&mut activity, &[(1, 9000), (2, 7), (3, 25), (4, 3)], 200), [3, 2, 4]);
    activity.counted(process(3), Some(25 * MS));
    activity.refused(process(2));
    assert!(activity.postponed(process(4), 200 * MS));
    assert_eq!(look(&mut activity, &[(1, 9001), (2, 99), (3, 99), (4, 99)], 205), [1]);
    assert_eq!(look(&mut activity, &[(1, 9001), (2, 99), (3, 99), (4, 99)], 300), [1, 4]);
}

#[test]
fn threads_of_a_process_are_added_up_and_kernel_threads_left_out() {
    let mut activity = Activity::new(2, 1, false);
    let thread = |tgid, memory_users| LivingThread { memory_users, ..living(process(tgid), 9 * MS) };
    activity.look(&[], MS, |_| false, |_| true);
    activity.look(&[thread(1, 2), thread(1, 2), thread(2, 0)], 2 * MS, |_| false, |_| true);
    assert_eq!(activity.due(2 * MS), [process(1)]);
    let cpu = activity.of(process(1)).unwrap();
    assert_eq!((cpu.all_ns, cpu.counted_ns, activity.of(process(2))), (18 * MS, 0, None));
}

#[test]
fn shares_are_of_the_time_since_the_recording_began() {
    let mut activity = Activity::new(2, 1, false);
    look(&mut activity, &[(1, 1000), (2, 500)], 100);
    look(&mut activity, &[(1, 1010), (2, 500), (3, 30)], 200);
    activity.counted(process(1), Some(1020 * MS));
    activity.counted(process(3), None);
    look(&mut activity, &[(1, 1060), (2, 540), (3, 70)], 300);
    let share = |tgid| activity.of(process(tgid)).unwrap().share();
    assert!((share(1) - 40.0 / 60.0).abs() < 1e-9 && share(2) == 0.0 && (share(3) - 40.0 / 70.0).abs() < 1e-9);
    let nobody = Progress::default();
    let all = activity.of_all(&nobody, |_| true);
    assert_eq!((all.all_ns, all.counted_ns), (170 * MS, 80 * MS));
    assert_eq!(activity.of_all(&nobody, |process| process.tgid == 2), CpuTime { all_ns: 40 * MS, counted_ns: 0 });
    // They began before the recording, and end.
    look(&mut activity, &[], 400);
    assert_eq!(activity.of_all(&nobody, |_| true), all);
}

#[test]
fn whoever_is_no_target_and_ends_is_in_no_share() {
    let mut activity = Activity::new(2, 1, true);
    look(&mut activity, &[(1, 10), (9, 10)], 100);
    look(&mut activity, &[(1, 20), (9, 500)], 200);
    look(&mut activity, &[], 300);
    assert_eq!(activity.of_all(&Progress::default(), |_| true), CpuTime { all_ns: 10 * MS, counted_ns: 0 });
}

#[test]
fn what_was_counted_stays_so_when_it_is_over() {
    let mut activity = Activity::new(2, 1, false);
    look(&mut activity, &[(1, 1000), (2, 0)], 100);
    activity.counted(process(1), Some(1000 * MS));
    look(&mut activity, &[(1, 1030), (2, 10)], 200);
    [1, 2, 3].iter().for_each(|tgid| activity.given_up(process(*tgid)));
    assert!(look(&mut activity, &[(1, 1090), (2, 90), (3, 90)], 300).is_empty(), "nobody is hooked any more");
    let share = |tgid| activity.of(process(tgid)).unwrap().share();
    assert!((share(1) - 30.0 / 90.0).abs() < 1e-9 && share(2) == 0.0 && share(3) == 0.0);
}

#[test]
fn those_that_began_and_ended_in_the_recording_are_added_up_by_the_programs() {
    let mut activity = Activity::new(2, 1, false);
    let process = |tgid| ProcessKey { tgid, start_ns: 5, ..ProcessKey::default() };
    let mut look = |cpu_ms: &[(u32, u64)], now_ms: u64, counted: &[u32]| {
        let cpu_ms: Vec<_> = cpu_ms.iter().map(|(tgid, ms)| (process(*tgid), *ms)).collect();
        look_counted(&mut activity, &cpu_ms, now_ms, |process| counted.contains(&process.tgid));
    };
    look(&[], 100, &[]);
    // The first has its parent's hooks, the second is hooked later, the third never.
    look(&[(1, 10), (2, 20), (3, 30)], 200, &[1]);
    look(&[(1, 20), (2, 25), (3, 40)], 300, &[1, 2]);
    look(&[(1, 30), (2, 35), (3, 50)], 400, &[1, 2]);
    assert_eq!([1, 2, 3].map(|tgid| activity.of(process(tgid)).unwrap().counted_ns), [30 * MS, 10 * MS, 0]);
    let all = activity.of_all(&Progress::default(), |_| true);
    activity.look(&[], 500 * MS, |_| false, |_| true);
    let ended = Progress { ended_counted_ns: 65 * MS, ended_uncounted_ns: 50 * MS, ..Progress::default() };
    assert_eq!((all.all_ns, activity.of_all(&ended, |_| true)), (115 * MS, all));
}

/// Checks processes, some of which began in the recording, with this much CPU time, ms.
fn look_at(activity: &mut Activity, cpu_ms: &[(ProcessKey, u64)], now_ms: u64) {
    look_counted(activity, cpu_ms, now_ms, |_| false);
}

/// The same, with those whose calls are counted now.
fn look_counted(
    activity: &mut Activity,
    cpu_ms: &[(ProcessKey, u64)],
    now_ms: u64,
    is_counted: impl Fn(ProcessKey) -> bool,
) {
    let thread = |(process, ms): &(ProcessKey, u64)| living(*process, ms * MS);
    activity.look(&cpu_ms.iter().map(thread).collect::<Vec<_>>(), now_ms * MS, is_counted, |_| true);
}

#[test]
fn whoever_ends_before_the_check_after_its_hooks_was_not_counted_before_them() {
    let mut activity = Activity::new(2, 1, false);
    let short = ProcessKey { tgid: 1, start_ns: 5, ..ProcessKey::default() };
    look_at(&mut activity, &[], 100);
    look_at(&mut activity, &[(short, 20)], 200);
    activity.counted(short, Some(25 * MS));
    look_at(&mut activity, &[], 300);
    let ended = Progress { ended_counted_ns: 40 * MS, ..Progress::default() };
    assert_eq!(activity.of_all(&ended, |_| true), CpuTime { all_ns: 40 * MS, counted_ns: 15 * MS });
}

#[test]
fn an_exec_neither_ends_nor_begins_a_process() {
    let mut activity = Activity::new(2, 1, false);
    // One began before the recording, and one in it.
    let [old, new] = [0, 5].map(|start_ns| [0, 1].map(|exec_id| ProcessKey { start_ns, tgid: 1, exec_id }));
    look_at(&mut activity, &[(old[0], 10_000)], 100);
    look_at(&mut activity, &[(old[1], 10_100), (new[0], 50)], 200);
    assert_eq!(activity.of(old[1]), Some(CpuTime { all_ns: 100 * MS, counted_ns: 0 }));
    look_at(&mut activity, &[(old[1], 10_100), (new[1], 60)], 300);
    activity.counted(new[1], Some(70 * MS));
    look_at(&mut activity, &[(old[1], 10_100), (new[1], 90)], 400);
    assert_eq!(activity.of(new[1]), Some(CpuTime { all_ns: 40 * MS, counted_ns: 20 * MS }));
    let all = CpuTime { all_ns: 190 * MS, counted_ns: 20 * MS };
    assert_eq!(activity.of_all(&Progress::default(), |_| true), all);
    look_at(&mut activity, &[], 500);
    let ended = Progress { ended_counted_ns: 90 * MS, ..Progress::default() };
    assert_eq!(activity.of_all(&ended, |_| true), all);
}

#[test]
fn what_an_allocator_lacked_is_taken_off_once() {
    let mut activity = Activity::new(2, 1, false);
    let [first, second] = [0, 1].map(|exec_id| ProcessKey { start_ns: 5, tgid: 1, exec_id });
    look_at(&mut activity, &[], 100);
    look_at(&mut activity, &[(first, 10)], 200);
    activity.lacked(first, 50 * MS);
    activity.counted(first, None);
    look_at(&mut activity, &[(first, 40)], 300);
    assert_eq!(activity.of(first), Some(CpuTime { all_ns: 40 * MS, counted_ns: 30 * MS }), "before it was counted");
    activity.lacked(first, 20 * MS);
    activity.let_go(first);
    look_at(&mut activity, &[(first, 50)], 400);
    activity.counted(first, None);
    look_at(&mut activity, &[(first, 60)], 500);
    assert_eq!(activity.of(first), Some(CpuTime { all_ns: 60 * MS, counted_ns: 20 * MS }));
    // No check has seen the next program yet.
    activity.lacked(second, 5 * MS);
    look_at(&mut activity, &[(second, 100)], 600);
    assert_eq!(activity.of(second), Some(CpuTime { all_ns: 40 * MS, counted_ns: 35 * MS }));
    let all = CpuTime { all_ns: 100 * MS, counted_ns: 55 * MS };
    assert_eq!(activity.of_all(&Progress::default(), |_| true), all);
    look_at(&mut activity, &[], 700);
    let ended = Progress { ended_counted_ns: 100 * MS, ..Progress::default() };
    assert_eq!(activity.of_all(&ended, |_| true), all);
}

#[test]
fn as_many_have_places_as_there_are_descriptors_within_limits() {
    assert_eq!([0, 100, 199, 1 << 20].map(places), [FEWEST_AT_ONCE, 10, 19, MOST_AT_ONCE]);
}

/// Whoever loads an allocator before a check has seen it use CPU time has not been idle until then.
#[test]
fn who_was_not_checked_yet_is_not_idle() {
    let mut activity = Activity::new(2, 1, false).with_places(1);
    let young = ProcessKey { start_ns: 5, ..process(1) };
    look_at(&mut activity, &[], 100);
    look_at(&mut activity, &[(process(3), 5)], 20_000);
    activity.lacked(young, 0);
    look_at(&mut activity, &[(young, 0), (process(3), 50)], 20_100);
    assert_eq!((idlest(&activity, 20_100), idlest(&activity, 30_100)), (None, Some(1)));
}

/// Checks may or may not see the next program use CPU time, and it may be no target.
#[test]
fn what_was_counted_before_an_exec_stays_so_if_the_next_program_ends_uncounted() {
    for (is_target, cpu_ms) in [(true, 50), (true, 70), (false, 50), (false, 70)] {
        let mut activity = Activity::new(2, 1, false);
        let [hooked, next] = [0, 1].map(|exec_id| ProcessKey { start_ns: 5, tgid: 1, exec_id });
        look_at(&mut activity, &[], 100);
        look_at(&mut activity, &[(hooked, 20)], 200);
        activity.counted(hooked, Some(20 * MS));
        look_at(&mut activity, &[(hooked, 50)], 300);
        let thread = living(next, cpu_ms * MS);
        activity.look(&[thread], 400 * MS, |_| false, |_| is_target);
        let running = activity.of_all(&Progress::default(), |_| is_target);
        look_at(&mut activity, &[], 500);
        // The BPF programs add up targets only.
        let ended_uncounted_ns = if is_target { cpu_ms * MS } else { 0 };
        let ended = activity.of_all(&Progress { ended_uncounted_ns, ..Progress::default() }, |_| true);
        let all_ns = if is_target { cpu_ms * MS } else { 50 * MS };
        assert_eq!([running, ended], [CpuTime { all_ns, counted_ns: 30 * MS }; 2], "{is_target} {cpu_ms}");
    }
}

#[test]
fn whatever_is_said_of_an_unseen_program_counts_no_cpu_time_twice() {
    let mut activity = Activity::new(2, 1, false);
    let [first, second] = [0, 1].map(|exec_id| ProcessKey { start_ns: 0, tgid: 1, exec_id });
    look_at(&mut activity, &[(first, 10_000)], 100);
    activity.counted(first, Some(10_000 * MS));
    look_at(&mut activity, &[(first, 10_030)], 200);
    activity.given_up(second);
    look_at(&mut activity, &[(second, 10_050)], 300);
    assert!(activity.due(300 * MS).is_empty(), "it is not hooked again");
    // News of the previous program come late.
    activity.counted(first, Some(10_060 * MS));
    activity.given_up(first);
    look_at(&mut activity, &[(second, 10_060)], 400);
    let all = CpuTime { all_ns: 60 * MS, counted_ns: 30 * MS };
    assert_eq!(activity.of_all(&Progress::default(), |_| true), all);
    look_at(&mut activity, &[], 500);
    assert_eq!(activity.of_all(&Progress::default(), |_| true), all);
}

/// The process began before the recording, and no check sees its last program.
#[test]
fn what_a_missed_program_used_is_known_at_its_end() {
    let mut activity = Activity::new(2, 1, true);
    let [first, second] = [0, 1].map(|exec_id| ProcessKey { start_ns: 0, tgid: 1, exec_id });
    look_at(&mut activity, &[(first, 100)], 100);
    activity.counted(first, None);
    look_at(&mut activity, &[(first, 120)], 200);
    activity.missed(second);
    activity.missed(first);
    activity.ended(second, 150 * MS);
    // What this one used before the recording is not known.
    activity.missed(process(2));
    activity.ended(process(2), 1000 * MS);
    look_at(&mut activity, &[], 300);
    let all = CpuTime { all_ns: 50 * MS, counted_ns: 20 * MS };
    assert_eq!(activity.of_all(&Progress::default(), |_| true), all);
}

#[test]
fn whoever_is_given_up_takes_nothing_off_the_others() {
    let mut activity = Activity::new(2, 1, false);
    let process = ProcessKey { tgid: 1, start_ns: 5, ..ProcessKey::default() };
    look_at(&mut activity, &[], 100);
    look_at(&mut activity, &[(process, 10)], 200);
    activity.counted(process, None);
    look_at(&mut activity, &[(process, 40)], 300);
    activity.given_up(process);
    look_at(&mut activity, &[(process, 90)], 400);
    look_at(&mut activity, &[], 500);
    let ended = Progress { ended_counted_ns: 50 * MS, ended_uncounted_ns: 90 * MS, ..Progress::default() };
    assert_eq!(activity.of_all(&ended, |_| true), CpuTime { all_ns: 140 * MS, counted_ns: 80 * MS });
}

#[test]
fn hooking_keeps_its_budget() {
    let mut activity = Activity::new(2, 1, false);
    look(&mut activity, &[], 100);
    assert_eq!(look(&mut activity, &[(1, 5)], 200), [1]);
    activity.spend(405 * MS);
    assert_eq!(activity.next_ns() / MS, 450, "2 ms are saved in 100 ms");
    activity.spend(45 * MS);
    assert!(look(&mut activity, &[(1, 50)], 300).is_empty(), "2 ms were saved since");
    assert_eq!(activity.next_ns() / MS, 1900, "the longest pause");
    assert_eq!(look(&mut activity, &[(1, 80)], 3000), [1]);
}

#[test]
fn looks_come_often_while_somebody_new_is_busy() {
    let mut activity = Activity::new(2, 1, false);
    let mut pause = |cpu_ms: &[(u32, u64)], now_ms: u64| {
        look(&mut activity, cpu_ms, now_ms);
        activity.next_ns() / MS - now_ms
    };
    assert_eq!([pause(&[(1, 5)], 100), pause(&[(1, 5)], 200), pause(&[(1, 5)], 400)], [100, 200, 400]);
    assert_eq!([pause(&[(1, 5)], 800), pause(&[(1, 5)], 1600), pause(&[(1, 5)], 2400)], [800, 800, 800]);
    assert_eq!(pause(&[(1, 25)], 3200), 100);
}

#[test]
fn whoever_is_no_target_keeps_nobody_awake() {
    let mut activity = Activity::new(2, 1, true);
    look(&mut activity, &[], 100);
    assert_eq!(look(&mut activity, &[(1, 5)], 200), [1]);
    activity.pass_over(process(1), 200 * MS);
    assert!(look(&mut activity, &[(1, 50)], 300).is_empty());
    assert_eq!(activity.next_ns() / MS, 500);
    // It may have become a target since.
    assert!(look(&mut activity, &[(1, 70)], 1700).is_empty());
    assert_eq!((activity.next_ns() / MS, look(&mut activity, &[(1, 90)], 1800)), (1800, vec![1]));
    activity.rest(1800 * MS);
    assert_eq!(activity.next_ns() / MS, 3400);
}

/// It uses CPU time all the time.
#[test]
fn who_was_passed_over_does_not_shorten_the_pauses() {
    let mut activity = Activity::new(2, 1, false);
    let (mut now_ms, mut looks) = (100, 0);
    while now_ms < 20_000 {
        for tgid in look(&mut activity, &[(9, now_ms)], now_ms) {
            activity.pass_over(process(tgid), now_ms * MS);
        }
        (now_ms, looks) = (activity.next_ns() / MS, looks + 1);
    }
    // Per long pause: when it is considered again, when it is due, and once in between. Some more while the pauses
    // grow.
    assert!(looks <= 3 * 20_000 * MS / LONGEST_PAUSE_NS + 6, "{looks}");
}

#[test]
fn so_many_are_hooked_at_once() {
    let mut activity = Activity::new(2, 1, false).with_places(2);
    look(&mut activity, &[], 100);
    let due = look(&mut activity, &[(1, 5), (2, 5), (3, 5)], 200);
    assert_eq!((due.len(), has_another(&activity)), (3, true));
    due[..2].iter().for_each(|tgid| activity.counted(process(*tgid), None));
    assert!(!has_another(&activity) && activity.has_place(due[0], &HashSet::new()), "it has one");
    look(&mut activity, &[(due[1], 5), (3, 5)], 300);
    assert!(has_another(&activity), "one has ended");
}

#[test]
fn who_is_taken_in_between_checks_has_a_place_once() {
    let mut activity = Activity::new(2, 1, true).with_places(3);
    [1, 2].iter().for_each(|pid| activity.took_in(*pid));
    let has_place =
        |activity: &Activity, pid, promised: &[u32]| activity.has_place(pid, &promised.iter().copied().collect());
    assert!(has_another(&activity) && !has_place(&activity, 3, &[5]), "the third place is promised");
    assert!(has_place(&activity, 2, &[5]), "it has one");
    assert!(has_place(&activity, 5, &[5]), "it is the one that was promised it");
    assert!(has_place(&activity, 3, &[2]), "the second one has one place");
    let threads = [1, 2].map(|tgid| living(process(tgid), MS));
    activity.look(&threads, 100 * MS, |process| process.tgid == 1, |_| true);
    assert!(has_place(&activity, 4, &[5]) && !has_place(&activity, 4, &[5, 6]), "the second one is not counted");
    [1, 3].iter().for_each(|pid| activity.took_in(*pid));
    assert!(has_another(&activity), "the first one has one place");
}

#[test]
fn who_has_ended_leaves_its_place_before_the_next_check() {
    let mut activity = Activity::new(2, 1, false).with_places(2);
    look(&mut activity, &[], 100);
    look(&mut activity, &[(1, 5)], 200);
    activity.counted(process(1), None);
    activity.took_in(2);
    assert!(!has_another(&activity));
    activity.ended(process(2), MS);
    activity.took_in(3);
    assert!(!has_another(&activity));
    activity.ended(process(1), 6 * MS);
    assert!(has_another(&activity));
    // Another process has the same id.
    activity.took_in(1);
    assert!(!has_another(&activity));
}

/// The first two of these processes are hooked and fill all places. The third one waits.
fn full(cpu_ms: [u64; 3]) -> Activity {
    let mut activity = Activity::new(2, 1, false).with_places(2);
    look(&mut activity, &[], 100);
    let [first, second, third] = cpu_ms;
    look(&mut activity, &[(1, first), (2, second), (3, third)], 200);
    [1, 2].iter().for_each(|tgid| activity.counted(process(*tgid), None));
    assert!(!has_another(&activity));
    activity
}

/// Whether a process without a place gets one.
fn has_another(activity: &Activity) -> bool {
    activity.has_place(99, &HashSet::new())
}

fn idlest(activity: &Activity, now_ms: u64) -> Option<u32> {
    activity.idlest_for(process(3), now_ms * MS, |process| process.tgid != 9).map(|process| process.tgid)
}

#[test]
fn who_has_been_idle_longest_makes_way_for_who_is_busy() {
    let mut activity = full([5, 5, 5]);
    assert_eq!(look(&mut activity, &[(1, 5), (2, 30), (3, 5)], 5_200), [3], "it waits");
    look(&mut activity, &[(1, 5), (2, 30), (3, 80)], 10_100);
    assert_eq!(idlest(&activity, 10_100), None, "nobody has been idle for ten seconds");
    look(&mut activity, &[(1, 5), (2, 30), (3, 95)], 10_200);
    assert_eq!(idlest(&activity, 10_200), Some(1));
    look(&mut activity, &[(1, 5), (2, 30), (3, 110)], 15_200);
    assert_eq!(idlest(&activity, 15_200), Some(1), "it has been idle longer than the second one");
    // It could not be stopped.
    activity.stays(process(1), 15_200 * MS);
    assert_eq!(idlest(&activity, 15_200), Some(2));
    look(&mut activity, &[(1, 5), (2, 30), (3, 111)], 15_300);
    assert_eq!(idlest(&activity, 15_300), None, "a process that uses little is not worth it");
}

#[test]
fn who_is_being_prepared_has_a_place_and_is_counted_once_it_is_hooked() {
    let mut activity = Activity::new(2, 1, false).with_places(1);
    look(&mut activity, &[], 100);
    assert_eq!(look(&mut activity, &[(1, 50), (3, 20)], 200), [1, 3]);
    assert!(activity.prepares(process(1), 200 * MS) && activity.is_being_prepared(process(1)));
    assert!(!has_another(&activity) && activity.awaits_hooks(process(1)));
    // A check finds the first of its allocators hooked.
    let threads = [(1, 60), (3, 50)].map(|(tgid, ms)| (process(tgid), ms * MS));
    let threads = threads.map(|(process, cpu_ns)| living(process, cpu_ns));
    activity.look(&threads, 20_000 * MS, |process| process.tgid == 1, |_| true);
    assert_eq!(activity.due(20_000 * MS), [process(3)]);
    assert_eq!(idlest(&activity, 40_000), None, "whoever is being prepared is not let go");
    activity.counted(process(1), Some(70 * MS));
    look(&mut activity, &[(1, 90), (3, 80)], 40_100);
    assert_eq!(activity.of(process(1)), Some(CpuTime { all_ns: 90 * MS, counted_ns: 20 * MS }));
    assert!(!has_another(&activity) && !activity.awaits_hooks(process(1)));
}

#[test]
fn who_cannot_be_prepared_or_is_given_up_loses_its_place() {
    let mut activity = Activity::new(2, 1, false).with_places(1);
    look(&mut activity, &[], 100);
    look(&mut activity, &[(1, 5), (2, 5)], 200);
    assert!(activity.prepares(process(1), 200 * MS) && activity.prepares(process(1), 300 * MS));
    assert_eq!([1, 7].map(|tgid| activity.prepared_for_ns(process(tgid), 300 * MS)), [100 * MS, 0]);
    assert!(!activity.prepares(process(1), 200 * MS + PREPARED_WITHIN_NS), "it takes too long");
    activity.pass_over(process(1), 20_000 * MS);
    assert!(has_another(&activity) && activity.awaits_hooks(process(1)));
    assert!(activity.prepares(process(1), 40_000 * MS) && activity.prepares(process(2), 40_000 * MS));
    activity.postponed(process(2), 40_000 * MS);
    activity.given_up(process(1));
    assert!(has_another(&activity) && !activity.awaits_hooks(process(1)) && activity.awaits_hooks(process(2)));
    assert!(!activity.prepares(process(7), 40_000 * MS), "it has ended");
}

#[test]
fn so_many_are_prepared_at_once() {
    let mut activity = Activity::new(2, 1, false);
    look(&mut activity, &[], 100);
    let busy: Vec<(u32, u64)> = (0..=MOST_PREPARED as u32).map(|tgid| (tgid, 5)).collect();
    let due = look(&mut activity, &busy, 200);
    assert_eq!(due.len(), MOST_PREPARED + 1);
    assert!(due[1..].iter().all(|tgid| !activity.is_spent() && activity.prepares(process(*tgid), 200 * MS)));
    assert!(activity.is_spent() && look(&mut activity, &busy, 300).is_empty());
    activity.counted(process(due[1]), None);
    activity.refused(process(due[2]));
    assert_eq!((activity.is_spent(), look(&mut activity, &busy, 400)), (false, vec![due[0]]));
}

#[test]
fn who_waits_to_be_stopped_keeps_nobody_from_being_prepared() {
    let mut activity = Activity::new(2, 1, false);
    look(&mut activity, &[], 100);
    let busy: Vec<(u32, u64)> = (0..=MOST_PREPARED as u32).map(|tgid| (tgid, 5)).collect();
    let due = look(&mut activity, &busy, 200);
    assert!(due[1..].iter().all(|tgid| activity.prepares(process(*tgid), 200 * MS)));
    let recent_ms = RECENT_NS / MS;
    assert!(look(&mut activity, &busy, 199 + recent_ms).is_empty());
    assert_eq!(look(&mut activity, &busy, 200 + recent_ms), [due[0]]);
    assert!(due[1..].iter().all(|tgid| activity.is_being_prepared(process(*tgid))));
}

#[test]
fn what_a_named_process_used_with_only_some_of_its_hooks_is_not_counted() {
    let mut activity = Activity::new(2, 1, true);
    let named = ProcessKey { tgid: 1, start_ns: 5, ..ProcessKey::default() };
    look_at(&mut activity, &[], 100);
    let thread = living(named, 10 * MS);
    activity.look(&[thread], 200 * MS, |_| true, |_| true);
    activity.counted_late(named, 30 * MS, Some(40 * MS));
    look_at(&mut activity, &[(named, 50)], 300);
    assert_eq!(activity.of(named), Some(CpuTime { all_ns: 50 * MS, counted_ns: 10 * MS }));
}

#[test]
fn who_may_not_go_stays() {
    let mut activity = Activity::new(2, 1, false).with_places(1);
    look(&mut activity, &[], 100);
    look(&mut activity, &[(9, 5), (3, 5)], 200);
    activity.counted(process(9), None);
    look(&mut activity, &[(9, 5), (3, 50)], 20_000);
    assert_eq!(idlest(&activity, 20_000), None);
    assert!(activity.idlest_for(process(3), 20_000 * MS, |_| true).is_some());
}

#[test]
fn who_was_let_go_is_hooked_again_once_it_is_active_and_keeps_its_counted_time() {
    let mut activity = full([0, 5, 5]);
    look(&mut activity, &[(1, 40), (2, 5), (3, 5)], 300);
    activity.let_go(process(1));
    activity.counted(process(3), None);
    let share = |activity: &Activity| activity.of(process(1)).unwrap();
    assert_eq!(share(&activity), CpuTime { all_ns: 40 * MS, counted_ns: 40 * MS });
    assert!(look(&mut activity, &[(1, 40), (2, 5), (3, 5)], 400).is_empty(), "it is idle");
    assert_eq!(look(&mut activity, &[(1, 50), (2, 5), (3, 5)], 500), [1]);
    activity.counted(process(1), Some(52 * MS));
    look(&mut activity, &[(1, 60), (2, 5), (3, 5)], 600);
    assert_eq!(share(&activity), CpuTime { all_ns: 60 * MS, counted_ns: 48 * MS });
    activity.given_up(process(1));
    look(&mut activity, &[(1, 90), (2, 5), (3, 5)], 700);
    assert_eq!(share(&activity), CpuTime { all_ns: 90 * MS, counted_ns: 48 * MS });
    look(&mut activity, &[], 800);
    let all = activity.of_all(&Progress::default(), |_| true);
    assert_eq!(all.counted_ns, 48 * MS, "those of the others were counted before anything was used");
}
