//! Programs that wait when samples arrive faster than heapbpf reads them: nothing is lost, and no program waits for
//! long.

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::{skipped, tool, turn};
use heapbpf_tests::inline::is_hooked;
use heapbpf_tests::output::{Profile, Stats};
use heapbpf_tests::program::{program, program_with};
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::{Target, until};
use heapbpf_tests::truth::Truth;

/// Capacity for some hundred samples: programs whose every call is sampled have to wait.
const SMALL_RING: [&str; 2] = ["--ring-bytes", "512KiB"];

fn with_small_ring(recorder: Recorder) -> Recorder {
    let [option, value] = SMALL_RING;
    recorder.option(option, value)
}

/// Checks that every sample arrived, with its whole stack and its free.
fn nothing_is_lost(stats: &Stats) {
    let names = ["stacks_lost", "stacks_missing", "stacks_shortened", "frees_lost", "untracked"];
    assert_eq!((names.map(|name| stats.other[name]), stats.lost(), stats.unsampled), ([0; 5], 0, 0), "{stats:?}");
    checks::identity(stats);
}

/// Checks that the targets waited, and that the profile says how long.
fn waited(profile: &Profile, stats: &Stats) {
    assert!(stats.other["waited_ns"] > 0, "{stats:?}");
    let waited = profile.notes.iter().find(|note| note.starts_with("the targets waited "));
    assert!(waited.is_some_and(|note| note.contains(" % of their CPU time, ")), "{:?}", profile.notes);
}

/// Checks that every stack reaches the entry of its thread.
fn stacks_are_whole(profile: &Profile) {
    assert!(profile.stacks.iter().all(|stack| stack.complete), "{:?}", profile.cuts());
}

/// Eight threads, with every call sampled.
#[test]
fn a_process_that_waits_loses_no_stack() {
    let Some(_turn) = turn("lossless_a_process_that_waits_loses_no_stack") else { return };
    let mut target = Target::start(&program("threads"), ["12800"]);
    let (outcome, truth) = with_small_ring(Recorder::of(target.pid(), 1)).flag("--lossless").record(&mut target);
    assert!(target.end().success());
    let (profile, stats) = outcome.results();
    nothing_is_lost(&stats);
    waited(&profile, &stats);
    checks::sites(&profile, &truth, 1, Compare::All);
}

/// With rings of the usual size, which have capacity for a part of the samples. Without the wait, up to nine in ten
/// stacks were lost.
#[test]
fn thirty_threads_lose_no_stack() {
    let Some(_turn) = turn("lossless_thirty_threads_lose_no_stack") else { return };
    let threads = program_with("threads", "threads-30", &["-DTHREADS=30"]);
    let recorder = Recorder::new().interval(1).variable("FREE_RUNNING", "1".as_ref());
    let outcome = recorder.command(&threads, ["4800"]).start().finish();
    let truth = Truth::in_output(&outcome.stdout);
    let (profile, stats) = outcome.results();
    nothing_is_lost(&stats);
    stacks_are_whole(&profile);
    checks::sites(&profile, &truth, 1, Compare::All);
}

/// The interpreter's own start and its objects, too.
#[test]
fn a_python_script_loses_no_stack() {
    const SCRIPT: &str = r#"
import json
records = [{"number": number, "text": "x" * (number % 97)} for number in range(2000)]
for _ in range(5): records = json.loads(json.dumps(records))
print(len(records))
"#;
    let case = "lossless_a_python_script_loses_no_stack";
    let Some(_turn) = turn(case) else { return };
    let Some(python) = tool("python3") else { return skipped(case, "python3 is not installed") };
    let script = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(script.path(), SCRIPT).expect("there is space");
    let outcome = Recorder::new().interval(1).command(&python, [script.path()]).start().finish();
    assert_eq!(outcome.stdout, "2000");
    let (profile, stats) = outcome.results();
    nothing_is_lost(&stats);
    stacks_are_whole(&profile);
    assert!(stats.submitted > 50_000 && profile.stacks.iter().any(|stack| stack.has("<module>")), "{stats:?}");
}

/// A command with a small interval waits without `--lossless`.
#[test]
fn a_command_waits_at_a_small_interval() {
    let Some(_turn) = turn("lossless_a_command_waits_at_a_small_interval") else { return };
    let recorder = || with_small_ring(Recorder::new().interval(1)).command(&program("steady"), ["40000"]);
    let outcome = recorder().start().ends();
    assert!(outcome.status.success(), "{}", outcome.stderr);
    let (profile, stats) = outcome.results();
    nothing_is_lost(&stats);
    waited(&profile, &stats);
    let (_, lossy) = recorder().flag("--lossless=no").start().ends().results();
    assert_eq!(lossy.other["waited_ns"], 0, "{lossy:?}");
    assert_eq!(lossy.exact_alloc_objects, stats.exact_alloc_objects);
}

/// When heapbpf is stopped or killed, no program keeps waiting.
#[test]
fn nobody_waits_for_a_heapbpf_that_does_not_run() {
    let Some(_turn) = turn("lossless_nobody_waits_for_a_heapbpf_that_does_not_run") else { return };
    for signal in [libc::SIGSTOP, libc::SIGKILL] {
        let mut target = Target::start(&program("threads"), ["12800"]);
        let recording = with_small_ring(Recorder::of(target.pid(), 1)).flag("--lossless").start();
        recording.signal(signal);
        let truth = target.run();
        if signal == libc::SIGSTOP {
            recording.signal(libc::SIGCONT);
            let (_, stats) = recording.stop().results();
            assert_eq!((stats.exact_alloc_objects, stats.exact_alloc_bytes), (truth.allocs(), truth.bytes()));
            checks::identity(&stats);
        }
        assert!(target.end().success());
    }
}

/// The end of a recording ends all waits, also for a program that keeps forking, and for its children.
#[test]
fn waits_end_with_the_recording() {
    let Some(_turn) = turn("lossless_waits_end_with_the_recording") else { return };
    let mut target = Target::start(&program("forking"), [""; 0]);
    for _ in 0..3 {
        let recording = with_small_ring(Recorder::of(target.pid(), 1)).flag("--lossless").start();
        assert!(is_hooked(target.pid()));
        let (_, stats) = recording.stop().results();
        checks::identity(&stats);
        until("a target without hooks", || !is_hooked(target.pid()));
    }
    target.go();
    assert_eq!(target.line(), "all children ended well");
    assert!(target.end().success());
}
