//! Whose memory counts as in use. Under filters, only that of running processes, with that of exited ones held
//! separately. With named targets, also that of exited ones. Also tests children that come and go while a recording
//! ends.

use std::path::{Path, PathBuf};

use heapbpf_tests::constant::{Cut, Judge, Load};
use heapbpf_tests::environment::turn;
use heapbpf_tests::output::{Estimate, Figures, Profile, Stats};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;
use heapbpf_tests::truth::Truth;

/// Load of the process that runs to the end. The next one is that of the process that exits before.
const LIVING: Load = Load::SLOW;
/// It has many blocks: removing them when the process exits must not touch those of the running one.
const ENDING: Load = Load { blocks: 3000, size: 700, ..Load::SLOW };

/// The programs' name, which no other process on the host has.
const NAME: &str = "in-use-of-whom";

fn of_that_name(dir: &Path) -> PathBuf {
    let copy = dir.join(NAME);
    std::fs::copy(program("constant"), &copy).expect("our own directory");
    copy
}

/// A recorded pair: what each process holds, the profile and the stats.
struct Pair {
    living: (u32, Truth),
    ended: (u32, Truth),
    profile: Profile,
    stats: Stats,
}

/// Records two processes, one of which exits before the recording ends.
fn pair(recorder: impl FnOnce([u32; 2]) -> Recorder) -> Pair {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = of_that_name(dir.path());
    let mut living = Target::start(&file, LIVING.arguments(0));
    let mut ending = Target::start(&file, ENDING.arguments(0));
    let pids = [living.pid(), ending.pid()];
    let recording = recorder(pids).start();
    let truths = [living.run(), ending.run()];
    assert!(ending.end().success());
    std::thread::sleep(std::time::Duration::from_millis(500));
    let (profile, stats) = recording.stop().results();
    let [living, ended] = truths;
    Pair { living: (pids[0], living), ended: (pids[1], ended), profile, stats }
}

/// What exited processes held, as a cut.
fn at_exit(from: &str, figures: &Figures) -> Cut {
    let figure = |estimate: &Option<Estimate>| estimate.clone().unwrap_or_else(|| panic!("{from}: nothing at exit"));
    Cut { from: from.into(), bytes: figure(&figures.at_exit_bytes), objects: figure(&figures.at_exit_objects) }
}

fn value(estimate: &Option<Estimate>) -> f64 {
    estimate.as_ref().and_then(|estimate| estimate.estimate).unwrap_or(0.0)
}

/// Checks a pair that was recorded by a filter at sampling interval R: memory in use is the running process's, and what
/// the other held when it exited is listed separately. At R > 1 figures are within 5 σ: one false alarm in 1.7 million
/// for each of four.
fn only_the_living(pair: &Pair, interval: u64, is_all: bool) {
    let profile = &pair.profile;
    let mut living = Judge::new(&LIVING, &pair.living.1);
    let mut ended = Judge::new(&ENDING, &pair.ended.1);
    let judged = |judge: &mut Judge, cut: &Cut| match interval {
        1 => judge.exact(cut),
        _ => judge.estimated(cut, interval, 5.0),
    };
    let (one, other) = (profile.process(pair.living.0), profile.process(pair.ended.0));
    assert!(!one.ended && other.ended, "{one:?} {other:?}");
    judged(&mut living, &Cut::of_figures("the living process", &one.figures));
    judged(&mut ended, &at_exit("the ended process", &other.figures));
    if !is_all {
        judged(&mut living, &Cut::of_figures("the totals in use", &profile.totals));
        judged(&mut ended, &at_exit("the totals at exit", &profile.totals));
    }
    // Includes other processes that exited on the host.
    for process in profile.processes.iter().filter(|process| process.ended) {
        let in_use = [value(&process.figures.inuse_bytes), value(&process.figures.inuse_objects)];
        assert_eq!(in_use, [0.0; 2], "it has ended: {process:?}");
    }
    for process in profile.processes.iter().filter(|process| !process.ended) {
        let at_exit = [value(&process.figures.at_exit_bytes), value(&process.figures.at_exit_objects)];
        assert_eq!(at_exit, [0.0; 2], "it lives: {process:?}");
    }
    let wrong = [living.into_wrong(), ended.into_wrong()].concat();
    let describe =
        || format!("{} {:?} {:?} {one:?} {other:?}", profile.notes.join("\n"), pair.stats.lost, pair.stats.other);
    assert!(wrong.is_empty(), "{}\n{}", wrong.join("\n"), describe());
}

#[test]
fn of_processes_by_name_the_living_have_memory_in_use() {
    let Some(_turn) = turn("of_processes_by_name_the_living_have_memory_in_use") else { return };
    only_the_living(&pair(|_| Recorder::new().interval(1).option("--comm", NAME)), 1, false);
}

#[test]
fn of_the_whole_host_the_living_have_memory_in_use() {
    let Some(_turn) = turn("of_the_whole_host_the_living_have_memory_in_use") else { return };
    const INTERVAL: u64 = 4096;
    let recorded = pair(|_| {
        Recorder::new().interval(INTERVAL).flag("--all").option("--hook", "probe").option("--max-overhead", "none")
    });
    only_the_living(&recorded, INTERVAL, true);
}

/// Named targets that have exited count as of their exit.
#[test]
fn of_named_processes_ended_ones_count_as_of_their_end() {
    let Some(_turn) = turn("of_named_processes_ended_ones_count_as_of_their_end") else { return };
    let recorded = pair(|pids| Recorder::of(pids[0], 1).pid(pids[1]));
    let (mut living, mut ended) = (Judge::new(&LIVING, &recorded.living.1), Judge::new(&ENDING, &recorded.ended.1));
    let profile = &recorded.profile;
    living.exact(&Cut::of_figures("the living process", &profile.process(recorded.living.0).figures));
    ended.exact(&Cut::of_figures("the ended process", &profile.process(recorded.ended.0).figures));
    let wrong = [living.into_wrong(), ended.into_wrong()].concat();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let apart = [value(&profile.totals.at_exit_bytes), value(&profile.totals.at_exit_objects)];
    assert_eq!(apart, [0.0; 2], "nothing stands apart");
}

/// At R = 1 the sampled figures equal the counted ones, up to reported losses. Running threads are counted slightly
/// after the profile's moment: the profile says how many samples fall in between.
fn counted_is_estimated(profile: &Profile, stats: &Stats) {
    let later = profile.slack().samples;
    let reported = stats.lost() + stats.other["allocations_reconciled"] + later;
    let objects = &profile.totals.alloc_objects;
    let missing = objects.exact.expect("counted") - objects.value();
    let context = || format!("{reported} are told, {later} of them later: {:?} {:?}", stats.lost, stats.other);
    assert!((0.0..=reported as f64).contains(&missing), "{missing} samples are missing, {}", context());
    let bytes = &profile.totals.alloc_bytes;
    assert!(reported > 0 || bytes.exact == bytes.estimate, "{bytes:?}");
    let other = |name: &str| stats.other[name];
    let arrived = other("stacks_unwound") + other("stacks_lost") + other("stacks_missing");
    let under_way = i128::from(stats.submitted) - i128::from(arrived);
    // The counts inside a process are read before and after the kernel's. A call that passes its site between the two
    // counts as in flight, although its record has arrived (ARCHITECTURE.md, "Counted inside the process").
    let is_inline = profile.processes.iter().any(|process| process.hook.as_deref() == Some("inline"));
    let between = if is_inline { i128::from(stats.lost["in_flight"]) } else { 0 };
    let context = || format!("{} sent, {arrived} arrived, {}", stats.submitted, context());
    assert!((-between..=i128::from(later)).contains(&under_way), "{}", context());
}

fn no_alarm(text: &str) {
    assert!(!text.split_whitespace().collect::<Vec<_>>().join(" ").contains("do not trust"), "{text}");
}

/// Records a server that forks a process per connection, like PostgreSQL. The recording ends while children come and
/// go.
fn end_among_children(hook: &str, arguments: [&str; 4]) {
    const SECONDS: f64 = 1.0;
    let mut parent = Target::start(&program("backends"), arguments);
    parent.go();
    let recorder = Recorder::of(parent.pid(), 1).option("--hook", hook);
    let outcome = recorder.option("-d", &format!("{SECONDS}s")).start().finish();
    let (profile, stats) = outcome.results();
    println!("{hook} {arguments:?}: {} s, {} sent", profile.duration_seconds, stats.submitted);
    counted_is_estimated(&profile, &stats);
    no_alarm(&format!("{}{}{}", outcome.stdout, outcome.stderr, profile.notes.join("\n")));
    let recorded = profile.duration_seconds;
    assert!((recorded - SECONDS).abs() <= 0.5, "{hook} {arguments:?}: {recorded} s recorded instead of {SECONDS}");
}

/// What children do. Those of the last case do not sleep, so some end during each reading of the counters.
const CHILDREN: [[&str; 4]; 3] =
    [["4", "50", "1000", "10000"], ["20", "200", "1000", "50000"], ["40", "10", "1000", "0"]];

#[test]
fn samples_of_children_at_the_end_are_in() {
    let Some(_turn) = turn("samples_of_children_at_the_end_are_in") else { return };
    CHILDREN.into_iter().for_each(|arguments| end_among_children("probe", arguments));
}

#[test]
fn samples_of_inline_children_at_the_end_are_in() {
    let Some(_turn) = turn("samples_of_inline_children_at_the_end_are_in") else { return };
    CHILDREN.into_iter().for_each(|arguments| end_among_children("inline", arguments));
}

/// The same with a filter by name, so that each child is covered from its first instruction and every allocation is
/// there. All children have exited at the end. What they held is as of their exits.
#[test]
fn children_that_come_and_go_are_all_there() {
    let Some(_turn) = turn("children_that_come_and_go_are_all_there") else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = dir.path().join("in-use-backends");
    std::fs::copy(program("backends"), &file).expect("our own directory");
    let mut parent = Target::start(&file, ["8", "100", "1000", "5000"]);
    let recording = Recorder::new().interval(1).option("--comm", "in-use-backends").start();
    parent.go();
    std::thread::sleep(std::time::Duration::from_secs(1));
    // A line on its input stops the forking. The report covers all children.
    let truth = parent.run();
    let outcome = recording.stop();
    let (profile, stats) = outcome.results();
    counted_is_estimated(&profile, &stats);
    no_alarm(&format!("{}{}{}", outcome.stdout, outcome.stderr, profile.notes.join("\n")));
    assert_eq!(stats.exact_alloc_bytes, truth.bytes(), "{stats:?}");
    assert_eq!(stats.submitted, truth.allocs(), "{stats:?}");
    let totals = &profile.totals;
    assert_eq!([value(&totals.inuse_bytes), value(&totals.inuse_objects)], [0.0; 2], "all children have ended");
    let at_exit = [value(&totals.at_exit_bytes), value(&totals.at_exit_objects)];
    assert_eq!(at_exit, [truth.live_bytes() as f64, truth.live_allocs() as f64]);
}
