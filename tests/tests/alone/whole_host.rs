//! Recordings of the whole host, or of programs by a name that other tests use as well.

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::distinct::Distinct;
use heapbpf_tests::environment::turn;
use heapbpf_tests::output;
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;

#[test]
fn all_covers_a_process_that_starts_later() {
    let Some(_turn) = turn("all_covers_a_process_that_starts_later") else { return };
    const INTERVAL: u64 = 16 << 10;
    let mut before = Target::start(&program("mix"), ["30000"]);
    let recording = Recorder::new().flag("--all").option("--hook", "probe").interval(INTERVAL).start();
    let mut after = Target::start(&program("pairs"), ["50000", "2", "700"]);
    let truths = [(before.pid(), before.run()), (after.pid(), after.run())];
    let own = recording.pid();
    let (profile, _) = recording.stop().results();
    for (pid, truth) in &truths {
        checks::sites_of(&profile, *pid, truth, INTERVAL, Compare::All);
        assert!(!profile.process(*pid).ended);
    }
    assert!(profile.processes.iter().all(|process| process.pid != own), "the sampler samples itself");
}

/// An idle process has an entry with its memory. Kernel threads, which have none, and heapbpf itself have no entry.
#[test]
fn all_lists_who_does_nothing() {
    let Some(_turn) = turn("all_lists_who_does_nothing") else { return };
    let target = Target::start(&program("pairs"), ["500"]);
    let recording = Recorder::new().flag("--all").interval(512 << 10).start();
    let own = recording.pid();
    let outcome = recording.stop();
    let profile: serde_json::Value = output::read(&outcome.file("profile.json"));
    let of = |pid: u32| profile["processes"].as_array().expect("processes").iter().find(|it| it["pid"] == pid);
    let idle = of(target.pid()).expect("it is listed");
    assert_eq!((&idle["idle"], &idle["memory_coverage"]), (&true.into(), &0.0.into()), "{idle}");
    assert!(idle["resident"]["files"].as_u64().is_some_and(|bytes| bytes > 0), "{idle}");
    assert!(of(1).is_some(), "the first process is a process");
    assert_eq!((of(2), of(own)), (None, None));
    assert!(target.end().success());
}

/// Programs are built, run once and deleted, as on a host that builds for weeks. heapbpf forgets what it knows about
/// them and closes their files.
#[test]
fn programs_that_never_come_again_are_forgotten() {
    let Some(_turn) = turn("programs_that_never_come_again_are_forgotten") else { return };
    let (recording, address) =
        Recorder::new().service().without_outputs().flag("--all").option("--hook", "probe").serve();
    let mut programs = Distinct::new();
    programs.run(300);
    let before = programs.settled(address, u64::MAX);
    programs.run(700);
    // The latest ones are kept, because programs usually run again. Other programs on the host may start at the same
    // time.
    let after = programs.settled(address, before.modules + 300);
    assert!(after.open <= before.open + 300, "{before:?} {after:?}");
    let deleted = programs.open_in(recording.pid());
    assert!(deleted <= 600, "{deleted} of 1000 deleted programs are open");
    recording.stop();
}
