//! Process ends that no record reports, because the events ring was full: heapbpf finds and reports them, and frees the
//! places of their blocks in the live map.

use heapbpf_tests::environment::turn;
use heapbpf_tests::output::{Estimate, Process};
use heapbpf_tests::program::{copy_of, program};
use heapbpf_tests::recorder::{Outcome, Recorder, Recording};
use heapbpf_tests::scrape::get;
use heapbpf_tests::target::{Target, until};

/// The smallest events ring: one page, which holds the records of fewer than thirty allocations.
const SMALLEST_RING: [&str; 2] = ["--ring-bytes", "4096"];

/// Runs `then` while heapbpf is stopped, so that its events ring fills up and stays full.
fn while_stopped<T>(recording: &Recording, then: impl FnOnce() -> T) -> T {
    recording.signal(libc::SIGSTOP);
    let pid = recording.pid();
    let states = || {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok())
    };
    until("heapbpf has stopped", || {
        states().all(|stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T')))
    });
    let result = then();
    recording.signal(libc::SIGCONT);
    result
}

/// Checks that the ends were found and reported to the user.
fn told(outcome: &Outcome) {
    let (profile, stats) = outcome.results();
    let lost = stats.other["process_events_lost"];
    assert!(lost > 0, "no record of an end was lost: {stats:?}");
    assert_eq!(stats.other["ends_found"], lost, "{stats:?}");
    let is_told = profile.notes.iter().any(|note| note.contains("were not reported"));
    assert!(is_told, "nobody says so: {:?}", profile.notes);
}

/// The process has ended, and its at-exit figures are as of its end.
#[test]
fn an_exit_whose_record_was_lost() {
    let Some(_turn) = turn("an_exit_whose_record_was_lost") else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = copy_of(&program("endings"), dir.path(), "heapbpf-lost-1");
    let mut target = Target::start(&file, ["sigkill", "400"]);
    let recorder = Recorder::new().option("--comm", "heapbpf-lost-1").interval(1);
    let recording = recorder.option(SMALLEST_RING[0], SMALLEST_RING[1]).start();
    let pid = target.pid();
    let truth = while_stopped(&recording, || {
        let truth = target.run();
        target.end();
        truth
    });
    let outcome = recording.stop();
    let (profile, stats) = outcome.results();
    told(&outcome);
    assert!(stats.other["blocks_of_ended"] > 0, "{stats:?}");
    let process = profile.process(pid);
    assert!(process.ended, "{process:?}");
    let value = |estimate: &Option<Estimate>| estimate.as_ref().and_then(|it| it.estimate);
    assert_eq!(value(&process.figures.inuse_objects), Some(0.0), "{process:?}");
    assert_eq!(value(&process.figures.at_exit_objects), Some(truth.live_allocs() as f64), "{process:?}");
}

/// The first program's memory is gone, the second one's is in use.
#[test]
fn an_exec_whose_record_was_lost() {
    let Some(_turn) = turn("an_exec_whose_record_was_lost") else { return };
    // Use several execs, because the first one's small record may fit where no other does.
    let mut target = Target::start(&program("family"), ["exec", "XXX"]);
    let recording =
        Recorder::of(target.pid(), 1).option("--hook", "probe").option(SMALLEST_RING[0], SMALLEST_RING[1]).start();
    let truth = while_stopped(&recording, || target.run());
    let outcome = recording.stop();
    let (profile, _) = outcome.results();
    // The ring may still have space for the record of the first exec. Then the lost records are of process generations
    // without samples.
    told(&outcome);
    let (last, before) = profile.processes.split_last().expect("its lives");
    assert!(before.iter().all(|process| process.ended) && !last.ended, "{:?}", profile.processes);
    let objects = |process: &Process| process.figures.inuse_objects.as_ref().and_then(|it| it.estimate);
    assert!(before.iter().all(|process| objects(process) == Some(0.0)), "gone with their programs: {before:?}");
    assert_eq!(objects(last), Some(truth.site("site_02").live_allocs as f64), "the last program's");
}

/// Places of ended processes in the live map are free again: the next process gets all that it needs.
#[test]
fn places_of_ended_processes_are_given_up() {
    let Some(_turn) = turn("places_of_ended_processes_are_given_up") else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = copy_of(&program("endings"), dir.path(), "heapbpf-lost-2");
    // Each process holds a thousand blocks.
    let recorder = Recorder::new()
        .option("--comm", "heapbpf-lost-2")
        .interval(1)
        .option("--live-max", "1500")
        .option("--hook", "probe");
    let (recording, address) = recorder.option(SMALLEST_RING[0], SMALLEST_RING[1]).serve();
    for ended in 1..=3 {
        let mut target = Target::start(&file, ["sigkill", "4000"]);
        while_stopped(&recording, || {
            target.run();
            target.end();
        });
        let found = || get(address, "/metrics").metric("heapbpf_events_total{name=\"ends_found\"}");
        until("the lost end is found", || found().is_some_and(|ends| ends >= f64::from(ended)));
    }
    let outcome = recording.stop();
    let (profile, stats) = outcome.results();
    told(&outcome);
    assert!(stats.other["blocks_of_ended"] > 0, "{stats:?}");
    assert_eq!(stats.other["untracked"], 0, "{stats:?}");
    assert_eq!(profile.totals.inuse_objects.and_then(|it| it.estimate), Some(0.0));
}
