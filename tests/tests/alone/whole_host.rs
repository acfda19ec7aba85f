//! Recordings of the whole host, or of programs by a name that other tests use as well.

use heapbpf_tests::busy::start_starved;
use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::distinct::Distinct;
use heapbpf_tests::environment::{skipped, tool, turn};
use heapbpf_tests::output;
use heapbpf_tests::program::{program, program_with};
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

/// `--all` with any other target option is still all processes.
#[test]
fn all_with_anything_is_all() {
    let Some(_turn) = turn("all_with_anything_is_all") else { return };
    let (mut one, mut other) = (Target::start(&program("pairs"), ["500"]), Target::start(&program("pairs"), ["500"]));
    let recorder = Recorder::of(one.pid(), 1)
        .flag("--all")
        .option("--hook", "probe")
        .option("--comm", "x")
        .option("--max-overhead", "none");
    let recording = recorder.start();
    let truths = [(one.pid(), one.run()), (other.pid(), other.run())];
    let (profile, _) = recording.stop().results();
    for (pid, truth) in &truths {
        checks::sites_of(&profile, *pid, truth, 1, Compare::All);
    }
    for target in [one, other] {
        target.end();
    }
}

/// Such a process cannot hide from a recording of the whole host either.
#[test]
fn a_crowd_of_mappings_does_not_hide_from_a_recording_of_the_host() {
    let Some(_turn) = turn("a_crowd_of_mappings_does_not_hide_from_a_recording_of_the_host") else { return };
    // An allocator that no other process has, so no other recording hooks it.
    let own = program_with("crowded", "crowded-static", &["-static"]);
    for (program, kind, count) in [(program("crowded"), "code", "9000"), (own, "pieces", "20000")] {
        let mut target = Target::start(&program, [kind, count, "1000"]);
        let recorder =
            Recorder::new().flag("--all").option("--hook", "probe").interval(512).option("--max-overhead", "none");
        let recording = recorder.start();
        let (pid, truth) = (target.pid(), target.run());
        let (profile, _) = recording.stop().results();
        let process = profile.process(pid);
        assert_eq!(process.figures.alloc_bytes.exact, Some(truth.bytes() as f64), "{process:?}");
        let (sums, truth) = (checks::site_sums(&profile, Some(pid)), truth.site("site_00"));
        let law = truth.law(512, false);
        assert!((sums["site_00"].figures[0] - law.bytes.truth).abs() <= law.bytes.tolerance(), "{sums:?}, {law:?}");
        let is_reported = |missing: &heapbpf_tests::output::Missing| {
            missing.why.contains("are not kept, as there are more than 8192")
        };
        assert!(process.missing.iter().any(is_reported), "{process:?}");
    }
}

/// The kernel reports a program's mappings before its exec ends. heapbpf may look up the interpreter's location in
/// between.
#[test]
fn a_program_that_has_to_wait_while_it_begins_has_the_names_of_its_functions() {
    const PROGRAMS: usize = 3;
    const SCRIPT: &str = "
import os
def leaf(n): return bytearray(n)
print('READY', os.getpid(), flush=True)
input()
kept = [leaf(3000 + i) for i in range(1000)]
print('DONE', flush=True)
input()
";
    let case = "a_program_that_has_to_wait_while_it_begins_has_the_names_of_its_functions";
    let Some(_turn) = turn(case) else { return };
    let Some(python) = tool("python3") else { return skipped(case, "python3 is not installed") };
    let recording = Recorder::new()
        .interval(2048)
        .option("--hook", "probe")
        .flag("--python-objects=no")
        .option("--comm", "python3*")
        .start();
    let words = [python.as_os_str(), "-S".as_ref(), "-c".as_ref(), SCRIPT.as_ref()];
    let mut targets = start_starved(PROGRAMS, &words);
    for target in &mut targets {
        target.go();
        assert_eq!(target.line(), "DONE");
    }
    let (profile, _) = recording.stop().results();
    let named = |target: &Target| profile.stacks.iter().any(|stack| stack.pid == target.pid() && stack.has("leaf"));
    let named = targets.iter().filter(|target| named(target)).count();
    assert_eq!(named, PROGRAMS, "{:?}", profile.notes);
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
