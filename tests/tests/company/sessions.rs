//! How a recording begins and ends: `--all`, commands, signals, durations, snapshots, files and messages.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::turn;
use heapbpf_tests::held;
use heapbpf_tests::output::{self, Profile};
use heapbpf_tests::program::{copy_file, program};
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::{Target, until};
use heapbpf_tests::truth::Truth;

const SHELL: &str = "/bin/sh";

/// Frames are named even though the program's file is deleted before the recording ends.
#[test]
fn the_functions_of_a_process_that_is_gone_are_named() {
    let Some(_turn) = turn("the_functions_of_a_process_that_is_gone_are_named") else { return };
    const INTERVAL: u64 = 4 << 10;
    held::most_are_whole("a program that is gone", || {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let copy = dir.path().join("gone");
        copy_file(program("mix"), &copy);
        // Without a filter, all other processes on the host would be symbolized as well.
        let recording = Recorder::new().option("--comm", "gone").interval(INTERVAL).start();
        let mut command = Command::new(&copy);
        let output = command.arg("20000").env("FREE_RUNNING", "1").stdin(Stdio::null()).output().expect("runs");
        std::fs::remove_file(&copy).expect("our own copy");
        let truth = Truth::in_output(&String::from_utf8_lossy(&output.stdout));
        let pid = truth.sites[0].pid;
        let outcome = recording.stop();
        let messages = &outcome.stderr;
        assert!(messages.contains("no running process matches --comm gone; waiting for one"), "{messages}");
        assert!(!outcome.stdout.contains("no process matches"), "it came: {}", outcome.stdout);
        let (profile, _) = outcome.results();
        let Some(process) = profile.processes.iter().find(|process| process.pid == pid && process.coverage == 1.0)
        else {
            assert!(held::is_reported(&profile, None), "{:?}", profile.notes);
            return [0, 1];
        };
        checks::sites_of(&profile, pid, &truth, INTERVAL, Compare::AtExit);
        assert!(process.ended);
        assert_eq!(process.comm, "gone");
        [1, 1]
    });
}

#[test]
fn a_commands_exit_status_is_heapbpfs() {
    let Some(_turn) = turn("a_commands_exit_status_is_heapbpfs") else { return };
    for (script, code, signal) in [
        ("exit 0", 0, None),
        ("exit 7", 7, None),
        ("kill -TERM $$", 128 + 15, Some("Terminated, signal 15")),
        ("kill -KILL $$", 128 + 9, Some("Killed, signal 9")),
    ] {
        let outcome = Recorder::new().command(Path::new(SHELL), ["-c", script]).start().ends();
        assert_eq!(outcome.status.code(), Some(code), "{script}: {}", outcome.stderr);
        let (profile, _) = outcome.results();
        let reported = outcome.stderr.lines().find_map(|line| line.strip_prefix("heapbpf: the command was ended: "));
        let noted = profile.notes.iter().find_map(|note| note.strip_prefix("the command was ended: "));
        assert_eq!([reported, noted], [signal; 2], "{script}: {}", outcome.stderr);
    }
}

/// A shell's `<&-`: Rust's runtime gives heapbpf itself /dev/null.
#[test]
fn a_descriptor_that_is_closed_is_closed_for_the_command_too() {
    let Some(_turn) = turn("a_descriptor_that_is_closed_is_closed_for_the_command_too") else { return };
    for (input, code) in [("<&-", 6), ("</dev/null", 5)] {
        let exec = format!("exec \"$0\" \"$@\" {input}");
        let recorder = Recorder::new().through(&[SHELL, "-c", exec.as_str()].map(OsStr::new));
        let script = "[ -e /proc/self/fd/0 ] && exit 5; exit 6";
        let outcome = recorder.command(Path::new(SHELL), ["-c", script]).start().ends();
        assert_eq!(outcome.status.code(), Some(code), "{input}: {}", outcome.stderr);
    }
}

#[test]
fn a_command_that_runs_on_is_told() {
    let Some(_turn) = turn("a_command_that_runs_on_is_told") else { return };
    let recorder = Recorder::new().option("--duration", "500ms");
    // It holds nothing open that the end of heapbpf's messages would be awaited on.
    let script = "exec sleep 600 > /dev/null 2>&1";
    let outcome = recorder.command(Path::new(SHELL), ["-c", script]).start().finish();
    let told = outcome.stderr.split_once("the command is still running (process ").map(|(_, rest)| rest);
    let pid = told.and_then(|rest| rest.split_once(')')?.0.parse().ok());
    let pid: libc::pid_t = pid.unwrap_or_else(|| panic!("it is not told: {}", outcome.stderr));
    // SAFETY: `kill` takes plain integers; the command sleeps for minutes.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGKILL) }, 0, "it still runs");
}

#[test]
fn ctrl_c_sigterm_and_a_lost_terminal_write_the_profile() {
    let Some(_turn) = turn("ctrl_c_sigterm_and_a_lost_terminal_write_the_profile") else { return };
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let mut target = Target::start(&program("pairs"), ["5000"]);
        let recording = Recorder::of(target.pid(), 1).start();
        let truth = target.run();
        recording.signal(signal);
        let outcome = recording.finish();
        let (profile, _) = outcome.results();
        checks::sites(&profile, &truth, 1, Compare::All);
        assert_eq!(outcome.files(), ["profile.folded", "profile.json", "profile.pb.gz", "stats.json"]);
        if signal == libc::SIGINT {
            assert!(outcome.stdout.contains("site_00"), "the top stack: {}", outcome.stdout);
            assert!(outcome.stdout.contains("profile.pb.gz"), "how to open the file: {}", outcome.stdout);
            assert!(!outcome.stdout.contains('\u{1b}'), "colours only for a terminal");
        }
        assert!(target.end().success(), "the target is as it was");
    }
}

#[test]
fn snapshots_are_whole_and_only_grow() {
    let Some(_turn) = turn("snapshots_are_whole_and_only_grow") else { return };
    let mut target = Target::start(&program("healing"), ["2000", "1500", "3000"]);
    let recording = Recorder::of(target.pid(), 1).option("--every", "300ms").start();
    let dir = recording.dir();
    let exists = |name: &str| dir.join(name).exists();
    target.go();
    target.step();
    until("a first snapshot", || exists("profile.0001.json") && exists("profile.0001.pb.gz"));
    let truth = target.run();
    until("three snapshots", || exists("profile.0003.json"));
    let outcome = recording.stop();
    let (profile, _) = outcome.results();
    checks::sites(&profile, &truth, 1, Compare::All);
    let mut before = 0.0;
    for name in outcome.files().iter().filter(|name| name.starts_with("profile.0") && name.ends_with(".json")) {
        let snapshot: Profile = output::read(&outcome.file(name));
        let bytes = snapshot.totals.alloc_bytes.value();
        assert!(bytes >= before, "{name}: {bytes} after {before}");
        before = bytes;
    }
    assert!(before <= profile.totals.alloc_bytes.value());
    assert!(outcome.files().iter().all(|name| !name.contains("tmp")), "{:?}", outcome.files());
    let first: Profile = output::read(&outcome.file("profile.0001.json"));
    assert!(first.totals.alloc_bytes.value() <= 2_000_000.0, "the second step is not in the first snapshot");
}

#[test]
fn standard_output_takes_a_profile() {
    let Some(_turn) = turn("standard_output_takes_a_profile") else { return };
    let mut target = Target::start(&program("pairs"), ["5000"]);
    let recorder = Recorder::of(target.pid(), 1).without_outputs().option("-o", "-").option("--format", "json");
    let (outcome, truth) = recorder.record(&mut target);
    let profile: Profile = serde_json::from_str(&outcome.stdout).unwrap_or_else(|e| panic!("{e}: {}", outcome.stdout));
    checks::sites(&profile, &truth, 1, Compare::All);
    assert!(outcome.stderr.contains("site_00"), "the table goes to standard error: {}", outcome.stderr);
}

#[test]
fn without_o_no_file_is_written_and_the_last_line_says_how() {
    let Some(_turn) = turn("without_o_no_file_is_written_and_the_last_line_says_how") else { return };
    let mut target = Target::start(&program("pairs"), ["500"]);
    let (outcome, _) = Recorder::of(target.pid(), 1).without_outputs().record(&mut target);
    assert!(outcome.files().is_empty(), "{:?}", outcome.files());
    let last = outcome.stdout.lines().last().unwrap_or_default();
    assert!(last.starts_with("no file was written · -o x.json"), "{}", outcome.stdout);
}

/// Links of one process cost other processes nothing.
#[test]
fn what_others_pay_for_probes_is_said_at_the_start() {
    let Some(_turn) = turn("what_others_pay_for_probes_is_said_at_the_start") else { return };
    let target = Target::start(&program("mix"), ["100"]);
    let messages_of = |recorder: Recorder| {
        let recording = recorder.start();
        recording.signal(libc::SIGINT);
        recording.ends().stderr
    };
    let says = |text: &str| text.contains("probes serve every process of this host that uses the same files: ");
    let of_all = messages_of(Recorder::new().option("--comm", "others-pay").option("--hook", "probe"));
    assert!(says(&of_all) && of_all.contains("SIGTRAP"), "{of_all}");
    let alone = messages_of(Recorder::of(target.pid(), 4096).option("--hook", "probe").flag("--no-follow"));
    assert!(!says(&alone), "{alone}");
    let first = messages_of(Recorder::of(target.pid(), 4096).flag("--follow=exec"));
    assert!(says(&first) && first.contains("they do not work with --follow=exec"), "{first}");
    let inline = messages_of(Recorder::new().option("--comm", "others-pay"));
    assert!(!says(&inline), "{inline}");
}

/// An empty profile would look like that of a program that allocates nothing.
#[test]
fn a_recording_that_nobody_matched_fails_and_writes_no_profile() {
    let Some(_turn) = turn("a_recording_that_nobody_matched_fails_and_writes_no_profile") else { return };
    let recorder = |hook: &str| Recorder::new().option("--comm", "nobody-has-it").option("--hook", hook);
    let interrupted = recorder("auto").start();
    interrupted.signal(libc::SIGINT);
    for outcome in [interrupted.ends(), recorder("probe").option("--duration", "1s").start().ends()] {
        let messages = &outcome.stderr;
        assert_eq!((outcome.status.code(), outcome.files()), (Some(1), Vec::new()), "{messages}");
        assert!(messages.contains("no running process matches --comm nobody-has-it; waiting for one"), "{messages}");
        assert!(messages.contains("no process matches --comm nobody-has-it, and none did so far"), "{messages}");
    }
    // A process that allocates nothing still matches.
    let recording = Recorder::new().option("--comm", "matches-once").start();
    let dir = tempfile::tempdir().expect("a temporary directory");
    let copy = dir.path().join("matches-once");
    copy_file("/bin/true", &copy);
    assert!(Command::new(&copy).status().expect("our own copy").success());
    recording.stop();
}
