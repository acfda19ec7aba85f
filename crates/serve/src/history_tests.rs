//! Tests of the history in memory.

use std::time::UNIX_EPOCH;

use heapbpf_access::filter::Filter;
use heapbpf_profile::testing;

use super::*;
use crate::source::tests::{finished, key};

pub(super) fn everything() -> ClientView {
    ClientView { scope: Filter::default(), filter: Filter::default() }
}

/// What a token with this scope sees.
pub(super) fn scoped(key: &str, value: &str) -> ClientView {
    let mut scope = Filter::default();
    assert_eq!(scope.set(key, value), Ok(true));
    ClientView { scope, ..everything() }
}

/// A profile at some second, with so many samples in use, and megabytes allocated, in its first process.
pub(super) fn made(second: u64, samples: u64) -> FinishedProfile {
    let mut profile = testing::small();
    profile.header.time = UNIX_EPOCH + Duration::from_secs(second);
    profile.rows[0].inuse = testing::sums(samples, 70_000, 524_288);
    profile.processes[0].exact_alloc_bytes = Some(samples * 1_000_000);
    profile.processes[1].exact_alloc_bytes = Some(0);
    let keys = profile.processes.iter().map(|process| key(process.pid)).collect();
    finished(profile, keys)
}

/// Keeps a sample of these processes: PID, in use, allocated.
pub(super) fn keep(history: &mut History, second: u64, after_gap: bool, processes: &[(u32, f64, f64)], cgroup: &str) {
    let mut largest = Vec::with_capacity(processes.len());
    for &(pid, inuse, alloc) in processes {
        let process = Process { pid, comm: format!("p{}", pid % 10), cgroup: cgroup.into(), ..Process::default() };
        largest.push((history.known(key(pid), &process), figures(inuse, alloc)));
    }
    keep_largest(history, second, after_gap, largest);
}

fn figures(inuse: f64, alloc: f64) -> Figures {
    Figures { inuse, low: inuse, high: inuse, alloc, counted: true }
}

fn keep_largest(history: &mut History, second: u64, after_gap: bool, largest: Vec<(Arc<KnownProcess>, Figures)>) {
    let whole = Figures::sum(largest.iter().map(|(_, figures)| figures), false);
    let (is_earlier, lossy, more) = (false, false, false);
    history.keep(Sample { time_ms: second * 1000, after_gap, is_earlier, lossy, more, whole, largest });
}

/// Size of a history, counted anew.
fn size(history: &History) -> usize {
    history.samples().map(Sample::bytes).sum::<usize>() + history.known.iter().map(|it| it.bytes()).sum::<usize>()
}

#[test]
fn an_hour_is_kept_whole_and_a_day_by_minutes() {
    const LAST: u64 = 100_000;
    let mut history = History::default();
    for second in (0..=LAST).step_by(10) {
        // This sample is not the first of its minute.
        keep(&mut history, second, second == 50_010, &[], "");
    }
    let times: Vec<u64> = history.samples().map(|sample| sample.time_ms / 1000).collect();
    assert_eq!(times.last(), Some(&LAST));
    let (older, recent) = times.split_at(history.older.len());
    assert_eq!((recent[0], recent.len()), (LAST - 3_600, 361));
    assert!(recent.windows(2).all(|pair| pair[1] - pair[0] == 10));
    assert!(older.windows(2).all(|pair| pair[1] - pair[0] == 60), "{older:?}");
    assert!((LAST - 86_400..LAST - 86_340).contains(&older[0]) && recent[0] - older[older.len() - 1] <= 60);
    let gaps: Vec<u64> = history.samples().filter(|it| it.after_gap).map(|it| it.time_ms / 1000).collect();
    assert_eq!(gaps, [50_040], "a gap stays one when the sample after it is dropped");
    assert_eq!(history.bytes, size(&history));
}

#[test]
fn what_is_missing_is_a_gap_and_has_no_rate() {
    let mut history = History::default();
    for (second, samples) in [(100, 1), (110, 2), (120, 5), (120, 9), (141, 6), (151, 6)] {
        history.add(&made(second, samples), EVERY);
    }
    let past = history.answer(0, u64::MAX, &everything());
    assert_eq!(past.time_ms, [100_000, 110_000, 120_000, 141_000, 151_000]);
    assert_eq!(past.after_gap, [1, 0, 0, 1, 0]);
    assert_eq!(past.alloc_per_second, [None, Some(100_000), Some(300_000), None, Some(0)]);
    let mut ends = past.low.iter().zip(&past.inuse).zip(&past.high);
    assert!(ends.all(|((low, inuse), high)| low < inuse && inuse < high), "{past:?}");
    // An answer that begins later has the rate since the sample before.
    let part = history.answer(110_001, 120_000, &everything());
    assert_eq!((&*part.time_ms, &*part.alloc_per_second), (&[120_000][..], &[Some(300_000)][..]));
    let slower = Duration::from_secs(25);
    history.add(&made(200, 6), slower);
    assert!(!history.recent[5].after_gap, "a longer pause was planned");
}

#[test]
fn before_the_first_sample_memory_in_use_is_not_known() {
    let mut history = History::default();
    let mut empty = made(100, 1);
    empty.profile.rows.clear();
    history.add(&empty, EVERY);
    history.add(&made(110, 1), EVERY);
    let past = history.answer(0, u64::MAX, &everything());
    assert_eq!((past.inuse[0], past.low[0], past.high[0]), (None, None, None));
    assert!(past.inuse[1].is_some() && past.low[1].is_some(), "{past:?}");
    assert!(past.programs.iter().all(|program| program.inuse[0].is_none() && program.inuse[1].is_some()));
    assert_eq!(past.alloc_per_second, [None, Some(0)], "what was counted is known");
}

#[test]
fn a_token_sees_what_its_scope_admits() {
    let mut history = History::default();
    [(100, 10), (110, 20)].iter().for_each(|&(second, samples)| history.add(&made(second, samples), EVERY));
    let names = |seen: &ClientView| -> Vec<String> {
        history.answer(0, u64::MAX, seen).programs.into_iter().map(|program| program.comm).collect()
    };
    assert_eq!(names(&everything()), ["server", "worker \"x\""], "the largest first");
    assert_eq!(names(&scoped("pid", "4242")), ["server"]);
    assert_eq!(names(&scoped("comm", "work*")), ["worker \"x\""]);
    assert_eq!(names(&scoped("cgroup", "/system.slice")), ["server"]);
    assert_eq!(names(&ClientView { filter: scoped("pid", "4300").scope, ..scoped("pid", "4242") }), [""; 0]);
    let [all, own] = [everything(), scoped("pid", "4242")].map(|seen| history.answer(0, u64::MAX, &seen));
    assert_eq!(own.inuse, own.programs[0].inuse);
    assert!(own.inuse[1] < all.inuse[1] && own.low[1] < own.inuse[1] && own.inuse[1] < own.high[1], "{own:?}");
    assert_eq!((own.alloc_per_second[1], all.alloc_per_second[1]), (Some(1_000_000), Some(1_000_000)));
    let nobody = history.answer(0, u64::MAX, &scoped("pid", "1"));
    assert_eq!((&*nobody.inuse, &*nobody.alloc_per_second), (&[None, None][..], &[None, None][..]));
    let json = serde_json::to_value(&nobody).unwrap();
    assert!(json["programs"] == serde_json::json!([]) && json["low"][0].is_null(), "{json}");
}

#[test]
fn processes_come_and_go() {
    let mut history = History::default();
    keep(&mut history, 10, true, &[(1, 5.0, 100.0), (2, 7.0, 900.0)], "");
    keep(&mut history, 20, false, &[(1, 5.0, 200.0), (11, 2.0, 1e9)], "");
    keep(&mut history, 30, false, &[(3, 1.0, 50.0)], "");
    let past = history.answer(0, u64::MAX, &scoped("cgroup", "/"));
    assert_eq!(past.inuse, [None; 3], "a cgroup that is not known is below none");
    let past = history.answer(0, u64::MAX, &scoped("comm", "p*"));
    assert_eq!(past.inuse, [Some(12), Some(7), Some(1)]);
    assert_eq!(past.alloc_per_second, [None, Some(10), None], "what a process had allocated before is not new");
    let program = |comm: &str| past.programs.iter().find(|program| program.comm == comm).unwrap();
    assert_eq!(program("p1").inuse, [Some(5), Some(7), None]);
    assert_eq!(program("p2").inuse, [Some(7), None, None]);
    assert_eq!(program("p3").inuse, [None, None, Some(1)]);
    assert_eq!((history.known.len(), history.bytes), (4, size(&history)));
    keep(&mut history, 200_000, true, &[(3, 1.0, 50.0)], "");
    assert_eq!((history.known.len(), history.bytes), (1, size(&history)), "only what is left is known");
}

#[test]
fn exact_totals_and_estimates_are_not_compared() {
    let mut history = History::default();
    for (second, counted) in [(100, true), (110, false), (120, false), (130, true), (140, true)] {
        let mut made = made(second, 1);
        if !counted {
            made.profile.processes[0].exact_alloc_bytes = None;
        }
        history.add(&made, EVERY);
    }
    let rates = [None, None, Some(0), None, Some(0)];
    assert_eq!(history.answer(0, u64::MAX, &everything()).alloc_per_second, rates);
    let own = history.answer(0, u64::MAX, &scoped("pid", "4242"));
    assert_eq!(own.alloc_per_second, rates);
    assert_eq!(own.programs[0].alloc_per_second, rates);
}

#[test]
fn a_part_that_may_have_more_processes_has_no_upper_end() {
    let mut history = History::default();
    let mut made = made(100, 10);
    for (second, count) in [(100, MOST_PROCESSES), (110, MOST_PROCESSES + 1)] {
        made.profile.header.time = UNIX_EPOCH + Duration::from_secs(second);
        for pid in 5000 + made.profile.processes.len() as u32..5000 + count as u32 {
            let process = Process { pid, ..made.profile.processes[1].clone() };
            made.profile.processes.push(process);
            made.keys.push(key(pid));
        }
        history.add(&made, EVERY);
    }
    let [all, own] = [everything(), scoped("pid", "4242")].map(|seen| history.answer(0, u64::MAX, &seen));
    assert!(all.high[0].is_some() && all.high[1].is_some(), "{all:?}");
    assert!(own.high[0].is_some() && own.high[1].is_none(), "{own:?}");
    assert!(own.inuse[0] == own.inuse[1] && own.low[0] == own.low[1] && own.low[1].is_some(), "{own:?}");
}

#[test]
fn a_name_takes_memory_only_where_it_occurs() {
    let mut history = History::default();
    for turn in 0..100 {
        let mut largest = Vec::new();
        for pid in turn * 100..(turn + 1) * 100 {
            let process = Process { pid, comm: pid.to_string(), ..Process::default() };
            largest.push((history.known(key(pid), &process), figures(f64::from(pid), 0.0)));
        }
        keep_largest(&mut history, u64::from(turn) * 10, false, largest);
    }
    let (_, names) = history.columns(0, u64::MAX, &everything());
    assert_eq!((names.len(), names.values().map(Vec::len).sum::<usize>()), (10_000, 10_000));
    let past = history.answer(0, u64::MAX, &everything());
    let kept: Vec<&str> = past.programs.iter().map(|program| &*program.comm).collect();
    let largest: Vec<String> = (9_950..10_000).rev().map(|pid: u32| pid.to_string()).collect();
    assert_eq!(kept, largest, "the largest first");
    let inuse = &past.programs[0].inuse;
    assert_eq!((inuse.len(), inuse[99]), (100, Some(9_999)));
    assert!(inuse[..99].iter().all(Option::is_none));
}

#[test]
fn memory_is_bounded_whatever_targets_do() {
    let (mut history, long) = (History::default(), "/".repeat(4000));
    for turn in 0..100 {
        let processes: Vec<_> = (0..MOST_PROCESSES as u32).map(|it| (turn * 1000 + it, 1.0, 1.0)).collect();
        keep(&mut history, u64::from(turn) * 10, turn == 0, &processes, &long);
        assert!(history.bytes <= MOST_BYTES, "{} bytes", history.bytes);
    }
    assert_eq!(history.bytes, size(&history));
    assert!((10..100).contains(&history.recent.len()), "the oldest are dropped: {}", history.recent.len());
    assert_eq!(history.recent.back().map(|last| last.time_ms), Some(990_000));
    // Processes that stay need no more than their figures.
    let mut usual = History::default();
    let processes: Vec<_> = (0..MOST_PROCESSES as u32).map(|pid| (pid, 1.0, 1.0)).collect();
    for minute in 0..1500 {
        keep(&mut usual, minute * 60, false, &processes, "/system.slice/some.service");
    }
    assert_eq!((usual.samples().count(), usual.known.len()), (1441, MOST_PROCESSES), "a day");
    assert!(usual.bytes < MOST_BYTES / 2, "{} bytes", usual.bytes);
}

#[test]
fn intervals_of_independent_figures_add_up() {
    let part = |low, inuse, high| Figures { inuse, low, high, ..figures(inuse, 1.0) };
    let parts = [part(70.0, 100.0, 140.0), Figures { alloc: 1.0, ..Figures::UNKNOWN }, part(60.0, 100.0, 130.0)];
    let sum = |lossy, count| Figures::sum(parts.iter().take(count), lossy);
    let ends = |it: Figures| [it.low, it.inuse, it.high, it.alloc];
    assert_eq!(ends(sum(false, 3)), [150.0, 200.0, 250.0, 3.0]);
    assert_eq!(ends(sum(true, 3)), [130.0, 200.0, 270.0, 3.0], "bounds on losses add");
    assert_eq!(ends(sum(false, 2))[..3], [70.0, 100.0, 140.0]);
    let unbounded = Figures::sum([part(f64::NAN, 100.0, f64::NAN), parts[0]].iter(), false);
    assert!(unbounded.inuse == 200.0 && unbounded.low.is_nan() && unbounded.high.is_nan());
    assert!(Figures::sum([].iter(), false).inuse.is_nan());
}
